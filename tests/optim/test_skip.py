"""The skip rule against a model in plain Python with a list as history."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import OptimConfig
from moejax.optim import decide, empty_history

WINDOW = 8
CONFIGS = {sigma: OptimConfig(skip_sigma=sigma, skip_window=WINDOW) for sigma in (1.5, 6.0, None)}
LENGTH = 30


def scanned(sigma):
    """Jitted decisions over a whole sequence of (loss, norm)."""

    def run(pairs):
        def step(history, pair):
            is_applied, is_finite, history = decide(CONFIGS[sigma], history, pair[0], pair[1])
            return history, (is_applied, is_finite)

        return jax.lax.scan(step, empty_history(CONFIGS[sigma]), pairs)

    return jax.jit(run)


RUNS = {sigma: scanned(sigma) for sigma in CONFIGS}


class Model:
    """What the docstring says, one step after the other. `close` marks a decision too near to its limit for float32."""

    def __init__(self, sigma):
        self.sigma, self.finite, self.close = sigma, [], False

    def decide(self, loss, norm):
        self.close = False
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return False, False
        known = self.finite[-WINDOW:]
        is_usual = True
        if self.sigma is not None and len(known) >= WINDOW / 2:
            for value, earlier in zip((loss, norm), zip(*known, strict=True), strict=True):
                limit = statistics.mean(earlier) + self.sigma * statistics.stdev(earlier)
                is_usual &= value <= limit
                self.close |= abs(value - limit) < 1e-4 * max(abs(limit), *map(abs, earlier))
        self.finite.append((loss, norm))
        return is_usual, True


usual = st.floats(1.0, 3.0, width=32)
strange = st.sampled_from([math.nan, math.inf, -math.inf, 50.0, 1000.0, -40.0, 0.0])
values = st.one_of(usual, usual, usual, usual, strange)


@pytest.mark.parametrize("sigma", CONFIGS)
@settings(max_examples=50)
@given(st.lists(st.tuples(values, values), min_size=LENGTH, max_size=LENGTH))
def test_decisions_and_history_equal_the_model(sigma, pairs):
    history, (applied, finite) = jax.device_get(RUNS[sigma](np.array(pairs, np.float32)))
    model = Model(sigma)
    for n, pair in enumerate(pairs):
        is_applied, is_finite = model.decide(*pair)
        assert bool(finite[n]) == is_finite
        assert model.close or bool(applied[n]) == is_applied, (n, pairs[: n + 1])
    assert int(history["count"]) == len(model.finite)
    kept = model.finite[-WINDOW:]
    for name, expected in zip(("loss", "grad_norm"), zip(*kept, strict=True) if kept else ((), ()), strict=True):
        assert sorted(history[name].tolist()) == sorted([*map(float, expected)] + [0.0] * (WINDOW - len(kept)))


def decisions(sigma, *pairs):
    padded = [*pairs] + [(1.0, 1.0)] * (LENGTH - len(pairs))
    return RUNS[sigma](np.array(padded, np.float32))[1][0].tolist()[: len(pairs)]


CALM = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9), (2.0, 1.0)]


@pytest.mark.parametrize("outlier", [(9.0, 1.0), (2.0, 9.0), (math.nan, 1.0), (2.0, math.inf)])
def test_an_outlier_of_either_is_skipped_and_the_next_step_is_not(outlier):
    assert decisions(6.0, *CALM, outlier, (2.0, 1.0)) == [True] * 4 + [False, True]


def test_half_a_window_must_be_known():
    assert decisions(6.0, *CALM[:3], (9.0, 1.0)) == [True] * 4


def test_a_sudden_drop_is_no_outlier():
    assert decisions(6.0, *CALM, (0.1, 0.01)) == [True] * 5


def test_non_finite_steps_are_skipped_without_a_sigma_and_from_the_first_step():
    assert decisions(None, (math.nan, 1.0), (2.0, 1.0), (900.0, 1.0), (2.0, -math.inf)) == [False, True, True, False]


def test_non_finite_steps_do_not_count_as_known():
    assert decisions(6.0, *CALM[:3], (math.nan, 1.0), (math.nan, 1.0), (9.0, 1.0)) == [True] * 3 + [False, False, True]


def test_a_lasting_change_of_level_ends_the_skipping():
    applied = decisions(1.5, *CALM, *CALM, *[(20.0, 1.0)] * WINDOW)
    assert not applied[WINDOW]
    assert applied[-1]


def test_equal_values_are_usual_although_their_deviation_is_zero():
    assert decisions(6.0, *[(2.3, 0.7)] * 12) == [True] * 12


def test_history_starts_empty():
    history = empty_history(CONFIGS[6.0])
    assert jnp.shape(history["loss"]) == jnp.shape(history["grad_norm"]) == (WINDOW,)
    assert int(history["count"]) == 0
