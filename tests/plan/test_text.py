"""What a plan says of a compiled step, with XLA's figures made up."""

import re

import pytest

from moejax.config import load_config
from moejax.plan import plan as module
from moejax.plan import plan_step
from moejax.plan.compiled import Compiled
from moejax.plan.estimate import ARGUMENTS, estimate, usable_bytes
from moejax.plan.payloads import Traffic, step_traffic
from moejax.plan.picture import _bars
from moejax.plan.plan import Plan, as_dict
from moejax.plan.text import lines

GIB, MIB = 2**30, 2**20
MANY = ("--model.moe.num-experts", "128")


def compiled_plan(monkeypatch, gpu: str, *words: str, more: float = 1.0, extra: tuple[Traffic, ...] = ()) -> Plan:
    """A plan whose step needs `more` times what arithmetic says beside its arguments, and sends `extra`."""
    config = load_config("eight_layers", words)
    memory = estimate(config, gpu).memory
    own = {name: int(size * more) for name, size in memory.items() if name not in ARGUMENTS}
    xla = Compiled(
        argument_bytes=sum(memory[name] for name in ARGUMENTS),
        arena_bytes=sum(own.values()) + 3 * GIB,
        metrics_bytes=0,
        roles=own,
        buffers=[],
        traffic=[*step_traffic(config), *extra],
        kernels={},
        conditionals=0,
        host_transfers=0,
        lower_s=1,
        compile_s=1,
    )
    monkeypatch.setattr(module, "compile_plan", lambda config, gpu: xla)
    return plan_step(config, gpu, compile=True)


def test_a_collective_that_is_not_counted_has_its_own_line_with_its_size(monkeypatch):
    large, small = Traffic("all-to-all", ("ep",), "bf16", 3 * GIB, 7), Traffic("all-reduce", ("ep",), "s32", MIB // 2, 4)
    text = "\n".join(lines(compiled_plan(monkeypatch, "b300", extra=(large, small))))
    assert re.search(r"all-to-all +ep +bf16 +7 +not counted +3\.00\n", text)
    assert "XLA has 4 more collectives below 1 MiB a step (metrics, norms), 0.50 MiB together" in text
    assert text.count("the same") == len(step_traffic(load_config("eight_layers")))


def test_suggestions_are_scaled_alike_in_text_json_and_picture(monkeypatch):
    plan = compiled_plan(monkeypatch, "h200", *MANY, more=1.05)
    assert not plan.fits
    assert plan.suggestions
    text, data, bars = "\n".join(lines(plan)), as_dict(plan)["suggestions"], list(_bars(plan).values())[2:]
    for suggestion, entry, bar in zip(plan.suggestions, data, bars, strict=True):
        plain = estimate(suggestion.config, "h200")
        own = sum(size for name, size in plain.memory.items() if name not in ARGUMENTS)
        assert suggestion.total_bytes == pytest.approx(plain.total_bytes + (plan.scale - 1) * own, abs=16)
        assert entry["total_bytes"] == suggestion.total_bytes == sum(bar.values()) == sum(entry["memory"].values())
        left = usable_bytes(plan.estimate.gpu) - suggestion.total_bytes
        assert entry["margin_bytes"] == left
        assert f"{suggestion.words}  " in text
        assert f"{suggestion.total_bytes / GIB:.2f} GiB, {left / GIB:.2f} left" in text


def test_what_packing_wastes_is_named_everywhere(monkeypatch):
    plan = compiled_plan(monkeypatch, "b300")
    assert re.search(r"  packing +3\.00\n", "\n".join(lines(plan)))
    assert as_dict(plan)["compiled"]["packing_bytes"] == 3 * GIB
    assert _bars(plan)["XLA"]["packing"] == 3 * GIB


def test_a_narrow_fit_by_arithmetic_is_called_narrow(monkeypatch):
    narrow = plan_step(load_config("eight_layers", [*MANY, "--model.recompute", "block", "--microbatches", "32"]), "b200")
    assert narrow.fits
    assert not narrow.is_narrow
    monkeypatch.setattr("moejax.plan.plan.usable_bytes", lambda gpu: narrow.total_bytes + GIB)
    assert narrow.is_narrow
    assert "narrowly: arithmetic can be 6% low" in "\n".join(lines(narrow))


def test_groups_that_lie_in_hosts_unevenly_are_named():
    words = ["--mesh.pp", "7", "--microbatches", "8"]
    uneven, even = ("\n".join(lines(plan_step(load_config("eight_layers", [*words, "--mesh.ep", ep]), "b300"))) for ep in "48")
    sentence = "collective-permute over pp: 16 of 28 GPUs send over the network; each link counts for the GPU that sends most over it"
    assert sentence in uneven
    assert "GPUs send over the network" not in even


def test_float32_is_not_measured_by_the_bf16_peak():
    words = ["--model.dtype", "float32", "--model.moe.grouped-matmul", "reference"]
    single, half = plan_step(load_config("eight_layers", words), "h100"), plan_step(load_config("eight_layers"), "h100")
    assert "of arithmetic at the TF32 peak" in "\n".join(lines(single))
    assert single.estimate.compute_s == 2 * half.estimate.compute_s


def test_mxfp8_without_products_in_it_is_said():
    config = load_config("eight_layers", ["--model.precision", "mxfp8"])
    assert "which h100 has no products in" in plan_step(config, "h100").estimate.choices["model.precision"]
    assert "model.precision" not in plan_step(config, "b200").estimate.choices
