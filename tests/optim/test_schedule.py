"""Learning rates against their formulas, step by step."""

import logging
import math
import warnings

import jax
import jax.numpy as jnp
import pytest

from moejax.config import OptimConfig, ScheduleConfig
from moejax.optim import make_schedule

PEAK = 0.4


def rates(steps, **schedule):
    """Rates of steps 1 to `steps`."""
    fn = make_schedule(OptimConfig(lr=PEAK, schedule=ScheduleConfig(**schedule)), steps)
    return [float(rate) for rate in jax.vmap(lambda n: jnp.asarray(fn(n)))(jnp.arange(1, steps + 1))]


def formula(n, steps, *, kind, warmup_steps=0, decay_steps=0, final_fraction=0.1):
    if n <= warmup_steps:
        return PEAK * n / warmup_steps
    length = {"cosine": steps - warmup_steps, "wsd": decay_steps, "constant": math.inf}[kind]
    done = min(1.0, max(0.0, (n - (steps - length)) / length)) if kind != "constant" else 0.0
    fall = (1 - math.cos(math.pi * done)) / 2 if kind == "cosine" else done
    return PEAK * (1 - fall * (1 - final_fraction))


CASES = [
    (20, {"kind": "cosine"}),
    (20, {"kind": "cosine", "warmup_steps": 5, "final_fraction": 0.0}),
    (20, {"kind": "cosine", "warmup_steps": 19, "final_fraction": 0.5}),
    (20, {"kind": "cosine", "warmup_steps": 20}),
    (20, {"kind": "cosine", "final_fraction": 1.0}),
    (1, {"kind": "cosine"}),
    (20, {"kind": "wsd", "warmup_steps": 4, "decay_steps": 6}),
    (20, {"kind": "wsd", "warmup_steps": 4, "decay_steps": 16, "final_fraction": 0.0}),
    (20, {"kind": "wsd", "decay_steps": 20}),
    (20, {"kind": "wsd", "decay_steps": 1}),
    (20, {"kind": "constant"}),
    (20, {"kind": "constant", "warmup_steps": 1}),
    (20, {"kind": "constant", "warmup_steps": 20}),
]


@pytest.mark.parametrize(("steps", "schedule"), CASES, ids=str)
def test_every_step_has_the_rate_of_the_formula_without_a_warning(steps, schedule, caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "absl"):
        warnings.simplefilter("error")
        ours = rates(steps, **schedule)
    assert ours == pytest.approx([formula(n, steps, **schedule) for n in range(1, steps + 1)], rel=1e-5, abs=1e-7)
    assert caplog.messages == []  # optax reports settings that it cannot follow


def test_a_warm_up_starts_above_zero_and_ends_at_the_peak():
    ours = rates(10, kind="cosine", warmup_steps=4)
    assert ours[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert ours[9] == pytest.approx(0.04)
