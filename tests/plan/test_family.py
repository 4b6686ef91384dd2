"""Plans of the eight-layer family as users make them, compiled: arithmetic beside XLA. Run with -s to see them."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from moejax.config import load_config
from moejax.plan import Plan, plan_step
from moejax.plan.text import lines

pytestmark = pytest.mark.slow


@functools.cache
def planned(gpu: str, *words: str) -> Plan:
    """The plan, in a process of its own: one process compiles for one kind of GPU."""
    config = load_config("eight_layers", words)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        plan = pool.submit(plan_step, config, gpu, num_gpus=8, compile=True).result()
    print("\n" + "\n".join(lines(plan)))
    return plan


def experts(count: int) -> tuple[str, str]:
    return "--model.moe.num-experts", str(count)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("b300", experts(8)),
        ("b300", experts(128)),
        ("h100", (*experts(8), "--model.recompute", "block")),
        ("b300", ("--model.moe.transport", "gather", "--model.recompute", "block")),
    ],
    ids=["8 experts, b300", "128 experts, b300", "8 experts, h100", "gather, b300"],
)
def test_arithmetic_is_what_xla_says(gpu, words):
    plan = planned(gpu, *words)
    figures, xla = plan.estimate, plan.compiled
    assert xla is not None
    assert xla.argument_bytes == sum(figures.memory[part] for part in ("parameters", "optimizer", "router", "counters", "batch"))
    assert abs(figures.total_bytes / xla.total_bytes - 1) < 0.1
    found = {tuple(line[:3]): line.payload for line in xla.traffic}
    assert all(found[tuple(link.line[:3])] == link.line.payload for link in figures.links)
    assert xla.conditionals == xla.host_transfers == 0
    assert any(name.startswith("grouped_forward") for name in xla.kernels)
    assert any("fmhaSoftmax" in name for name in xla.kernels)
    assert plan.fits


def test_the_47b_model_fits_eight_b300_with_room():
    plan = planned("b300", *experts(128))
    assert plan.total_bytes == plan.compiled.total_bytes
    assert plan.margin_bytes > 80 * 2**30


def test_what_is_suggested_for_eight_h200_fits_when_it_is_compiled():
    plan = plan_step(load_config("eight_layers", experts(128)), "h200")
    assert not plan.fits
    suggestion = plan.suggestions[0]
    compiled = planned("h200", *experts(128), *suggestion.words.split())
    assert compiled.config == suggestion.config
    assert compiled.fits
