"""What the dispatch benchmark reports; not how fast."""

import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel import make_mesh
from moejax.parallel.expert import bench
from moejax.plan.gpus import link_rate

ROOT = Path(__file__).parents[2]
CASE = bench.Case(tokens=16, embed_dim=4, top_k=2, num_experts=8, dtype="bfloat16", capacity_factor=100.0, tile=8)


@pytest.mark.slow
def test_p18_rates_count_the_rows_that_leave_a_rank_beside_the_link():
    lines = list(bench.measure(CASE, ["gather", "ring"], make_mesh(MeshConfig(ep=2)), link=1e9, repeats=1))
    assert [(line["transport"], line["move"]) for line in lines] == [
        (name, move) for name in ("gather", "ring") for move in ("dispatch", "combine")
    ]
    experts = np.asarray(bench._inputs(CASE, 2)[0]).reshape(2, -1)
    assert all(len(set(token)) == 2 for token in experts.reshape(-1, 2).tolist())
    leaving = max((experts[0] >= 4).sum(), (experts[1] < 4).sum())
    for line in lines:
        assert line["sent_bytes"] == leaving * 4 * 2
        assert line["bytes_per_s"] == pytest.approx(line["sent_bytes"] / line["seconds"])
        assert line["link_share"] == pytest.approx(line["bytes_per_s"] / 1e9)
        assert line["equal"] == (line["largest_error"] == 0)
        assert line["largest_error"] < 0.02
    assert lines[2]["equal"], "ring's rows are gather's, to the bit"


def test_p18_a_slow_link_is_warned_of_and_an_unknown_one_is_not():
    line = {"transport": "ragged", "move": "dispatch", "sent_bytes": 2**28, "bytes_per_s": 18e9, "link_share": 0.02}
    assert bench.slow_link(line) == (
        "ragged dispatch sends 18 GB/s a rank, 2 % of the link, below 20 % (a known case: https://github.com/openxla/xla/issues/33386); "
        "give it more tokens, or compare the other transports"
    )
    for quick in ({"link_share": 0.2}, {"link_share": None}, {"sent_bytes": 0}):
        assert bench.slow_link(line | quick) is None


def test_the_link_is_that_of_the_gpu_and_the_network_between_hosts():
    assert link_rate("NVIDIA H200", hosts=1) == 450e9
    assert link_rate("NVIDIA H200", hosts=2) == 50e9
    assert link_rate("NVIDIA GB200", hosts=16) == 900e9, "16 hosts of four are one NVLink domain"
    assert link_rate("NVIDIA GB200", hosts=17) == 50e9
    assert link_rate("cpu", hosts=1) is None


def test_a_transport_that_does_not_run_here_is_refused():
    with pytest.raises(ConfigError, match="ragged needs GPUs"):
        next(bench.measure(CASE, ["ragged"], make_mesh(MeshConfig(ep=2)), link=None, repeats=1))


@pytest.mark.slow
def test_the_tool_prints_a_line_for_each_transport_and_move(monkeypatch, capsys):
    words = "--tokens 16 --embed-dim 4 --experts 8 --top-k 2 --repeats 1 --cpu-devices 2"
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", *words.split()])
    runpy.run_path(str(ROOT / "tools" / "bench_dispatch.py"), run_name="__main__")
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["transport"] for line in lines] == ["gather"] * 2 + ["dense"] * 2 + ["ring"] * 2
    assert {line["ranks"] for line in lines} == {len(jax.devices())}
    assert "warning" not in printed.err
