"""Rotary embedding as multiplication by a complex number, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.rope import rope
from moejax.testing import assert_trees_close

turn = jax.jit(rope, static_argnames="theta")


def by_complex_numbers(x, positions, theta):
    """Pair (i, i + H/2) is one complex number, turned by position * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = positions[:, :, None, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    pairs = pairs * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("theta", [100.0, 500_000.0])
def test_turns_pairs_by_the_angle_of_their_frequency(theta, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 6)), dtype)
    positions = jnp.asarray(rng.integers(0, 40, (2, 5)), jnp.int32)
    y = turn(x, positions, theta=theta)
    assert y.dtype == x.dtype
    truth = by_complex_numbers(np.asarray(x, np.float64), np.asarray(positions), theta)
    assert_trees_close({"y": y}, {"y": truth}, dtype, "rope")


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(np.tile(rng.normal(size=8), (1, 6, 1, 1)), jnp.float32) for _ in range(2))
    positions = jnp.arange(6, dtype=jnp.int32)[None, :]
    scores = np.einsum("tnh,snh->ts", turn(q, positions, theta=100.0)[0], turn(k, positions, theta=100.0)[0])
    for distance in range(-5, 6):
        assert np.ptp(np.diagonal(scores, distance)) < 1e-5
    assert np.abs(np.diff(scores[0])).min() > 1e-3
