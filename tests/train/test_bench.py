"""What the benchmark of the step runs and reports; not how fast."""

import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from moejax.config import AttentionConfig
from moejax.parallel import make_mesh
from moejax.train import bench
from moejax.train.flops import count_parameters, flops_per_token
from moejax.train.state import abstract_state
from moejax.train.step import make_update_fn

TOOL = Path(__file__).parents[2] / "tools" / "bench_step.py"


def tiny():
    config = bench.bench_config(experts=4, dtype="float32", batch=2, seq=8, vocab=258)
    moe = dataclasses.replace(config.model.moe, expert_dim=8)
    model = dataclasses.replace(config.model, embed_dim=8, num_layers=1, attention=AttentionConfig(num_heads=2), moe=moe)
    return dataclasses.replace(config, model=model)


def test_the_config_is_the_step_of_the_documentation():
    config = bench.bench_config(experts=16, dtype="float32", batch=4, seq=128, vocab=2048)
    model, moe = config.model, config.model.moe
    assert (config.batch_size, config.data.seq_len, config.microbatches) == (4, 128, 1)
    assert (model.embed_dim, model.num_layers, model.attention.num_heads, model.head_dim, model.vocab_size) == (256, 4, 8, 32, 2048)
    assert (moe.num_experts, moe.top_k, moe.expert_dim, moe.num_shared_experts, moe.capacity_factor) == (16, 4, 256, 0, None)


def test_weights_and_optimizer_move_48_bytes_for_each_float32_parameter():
    config = tiny()
    assert bench.weight_traffic(config) == 48 * count_parameters(config.model)[0]
    half = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    assert bench.weight_traffic(half) == 42 * count_parameters(config.model)[0]


def test_each_result_of_the_update_takes_the_memory_of_its_old_value():
    config = tiny()
    mesh = make_mesh(config.mesh)
    state = abstract_state(config, mesh)
    update: Any = make_update_fn(config, mesh)
    compiled = update.lower(state, state.master).compile()
    places = re.findall(r"{(\d+)}: \((\d+), {}", compiled.as_text().split("input_output_alias=")[1].splitlines()[0])
    assert [(int(result), int(old)) for result, old in places] == [(i, i) for i in range(len(jax.tree.leaves(state)))]


def test_a_run_is_reported_in_consistent_numbers(monkeypatch):
    monkeypatch.setattr(bench, "_GEMM_DIM", 32)
    monkeypatch.setattr(bench, "_COPY_BYTES", 4096)
    config = tiny()
    line = bench.measure(config, repeats=2)
    assert (line["experts"], line["tokens"], line["repeats"]) == (4, 16, 2)
    assert line["flops"] == 16 * sum(flops_per_token(config.model, 8).values())
    assert line["tokens_per_s"] == pytest.approx(16 / line["step_s"])
    assert line["gemm_share"] == pytest.approx(line["flops"] / line["step_s"] / line["gemm_flops_per_s"])
    assert line["update_share"] == pytest.approx(line["update_s"] / line["step_s"])
    assert line["weight_traffic_s"] == pytest.approx(line["weight_traffic_bytes"] / line["copy_bytes_per_s"])
    assert line["max_load"] >= 1
    assert all(line[name] > 0 for name in ("compile_s", "step_cpu_s", "temp_bytes"))


def test_programs_take_turns_on_one_state():
    run = bench._Run(jnp.zeros(()))
    one, ten = run.program("one", lambda s: (s + 1, {"m": s})), run.program("ten", lambda s: (s + 10, run.metrics))
    for call in (one, ten, one):
        call()
    assert float(run.state) == 12
    assert float(run.metrics["m"]) == 11
    assert [len(times) for times in run.cpu_s.values()] == [2, 1]


def test_the_tool_prints_one_json_line_for_each_number_of_experts(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(bench, "measure", lambda config, repeats: seen.append((config, repeats)) or {"experts": 1, "step_s": 1 / 3})
    words = "--experts 4 8 --dtype bfloat16 --steps 3 --batch 5 --seq 6 --vocab 300"
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words.split()])
    monkeypatch.setattr("moejax.parallel.host_memory.keep_freed_memory", lambda: False)
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    runpy.run_path(str(TOOL), run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"experts": 1, "step_s": 0.3333}] * 2
    assert [(c.model.moe.num_experts, c.model.dtype, c.batch_size, c.data.seq_len, c.model.vocab_size) for c, _ in seen] == [
        (4, "bfloat16", 5, 6, 300),
        (8, "bfloat16", 5, 6, 300),
    ]
    assert {repeats for _, repeats in seen} == {3}
