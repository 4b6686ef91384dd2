"""Attention and its mask against loops over single queries in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.attention import attention, visible_keys
from moejax.testing import assert_trees_close

SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0, 0]])
"""One document; two documents and padding."""


def inputs(heads, kv_heads, dtype="float32"):
    rng = np.random.default_rng(heads * 10 + kv_heads)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {name: jnp.asarray(rng.normal(size=(2, 7, n, 4)) * 2, dtype) for name, n in sizes.items()}


@jax.jit
def masked_attention(q, k, v, segments, window):
    place = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None, :], segments.shape)
    return attention(q, k, v, visible_keys(place, place, segments, segments, window))


def by_loops(q, k, v, segments, window):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    y = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        first = 0 if window <= 0 else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
        scores = [math.exp(q[b, t, n] @ k[b, s, n // group] / math.sqrt(q.shape[3])) for s in seen]
        y[b, t, n] = sum(weight * v[b, s, n // group] for weight, s in zip(scores, seen, strict=True)) / sum(scores)
    return y


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [-1, 1, 3, 7, 100])
def test_equals_a_loop_over_queries(heads, kv_heads, window):
    arrays = inputs(heads, kv_heads)
    y = masked_attention(**arrays, segments=jnp.asarray(SEGMENTS, jnp.int32), window=jnp.int32(window))
    assert_trees_close({"y": y}, {"y": by_loops(**arrays, segments=SEGMENTS, window=window)}, "float32", "attention")


def test_bfloat16_inputs_are_scored_in_float32():
    arrays = inputs(4, 2, "bfloat16")
    y = masked_attention(**arrays, segments=jnp.asarray(SEGMENTS, jnp.int32), window=jnp.int32(-1))
    assert y.dtype == jnp.bfloat16
    assert_trees_close({"y": y}, {"y": by_loops(**arrays, segments=SEGMENTS, window=-1)}, "bfloat16", "attention")


def test_scores_of_thousands_do_not_overflow():
    arrays = {name: value * 100 for name, value in inputs(2, 2).items()}
    y = masked_attention(**arrays, segments=jnp.asarray(SEGMENTS, jnp.int32), window=jnp.int32(-1))
    assert np.isfinite(y).all()


def test_a_query_without_any_key_gives_finite_values_and_gradients():
    arrays = inputs(2, 1)
    visible = jnp.zeros((2, 7, 7), bool).at[:, 3:, 3].set(True)
    y = jax.jit(attention)(**arrays, visible=visible)
    gradients = jax.jit(jax.grad(lambda arrays: attention(**arrays, visible=visible).sum()))(arrays)
    assert all(np.isfinite(value).all() for value in (y, *gradients.values()))
    np.testing.assert_allclose(y[:, 3:], np.broadcast_to(arrays["v"][:, 3:4], (2, 4, 2, 4)), rtol=1e-6)


def test_keys_that_are_not_visible_have_no_influence():
    arrays = inputs(2, 2)
    segments = jnp.asarray(SEGMENTS, jnp.int32)
    before = masked_attention(**arrays, segments=segments, window=jnp.int32(3))
    changed = arrays | {name: arrays[name].at[0, 2].add(5.0).at[1, 1].add(5.0) for name in ("k", "v")}
    after = masked_attention(**changed, segments=segments, window=jnp.int32(3))
    is_same = (np.asarray(before) == np.asarray(after)).all(axis=(2, 3))
    # Row 0: key 2 is seen by queries 2 to 4 of its window. Row 1: key 1 by query 1 alone, the next document starts at 2.
    assert is_same.tolist() == [[True, True, False, False, False, True, True], [True, False, True, True, True, True, True]]


def test_a_mask_of_cached_keys_covers_places_that_are_not_filled_yet():
    query = jnp.full((1, 1), 2, jnp.int32)
    keys = jnp.arange(5, dtype=jnp.int32)[None, :]
    visible = visible_keys(query, keys, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 5), jnp.int32), jnp.int32(2))
    assert visible.tolist() == [[[False, True, True, False, False]]]
