"""Attention by chunks of keys, and its gradients, against a NumPy loop over queries in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.testing import assert_trees_close
from moejax_kernels.attention import Places, attention, choose_implementation
from moejax_kernels.attention.xla import chunked_attention

LENGTH = 11
SEGMENTS = np.array([[1] * 11, [1, 1, 2, 2, 2, 2, 3, 3, 0, 0, 0]])
"""One document; three documents and padding."""


def inputs(heads, kv_heads, dtype="float32", scale=2.0):
    rng = np.random.default_rng(heads * 10 + kv_heads)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "dy": heads}
    return {name: jnp.asarray(rng.normal(size=(2, LENGTH, n, 4)) * scale, dtype) for name, n in sizes.items()}


def places(segments=SEGMENTS):
    place = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    return Places(jnp.asarray(place, jnp.int32), jnp.asarray(segments, jnp.int32))


@functools.partial(jax.jit, static_argnames="chunks")
def with_gradients(q, k, v, dy, query, key, window, chunks):
    y, pull = jax.vjp(lambda q, k, v: chunked_attention(q, k, v, query, key, window, chunks), q, k, v)
    return {"y": y} | dict(zip(("dq", "dk", "dv"), pull(dy), strict=True))


def by_loops(q, k, v, dy, query, key, window):
    q, k, v, dy = (np.asarray(a, np.float64) for a in (q, k, v, dy))
    out = {"y": np.zeros_like(q), "dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    for b, t, n in np.ndindex(q.shape[:3]):
        distance = int(query.place[b, t]) - np.asarray(key.place[b])
        seen = np.flatnonzero((distance >= 0) & ((distance < window) | (window <= 0)) & (query.segment[b, t] == np.asarray(key.segment[b])))
        if not len(seen):
            continue
        keys, values = k[b, seen, n // group], v[b, seen, n // group]
        scores = keys @ q[b, t, n] * scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        dweights = values @ dy[b, t, n]
        dscores = weights * (dweights - weights @ dweights) * scale
        out["y"][b, t, n] = weights @ values
        out["dq"][b, t, n] = dscores @ keys
        np.add.at(out["dk"], (b, seen, n // group), dscores[:, None] * q[b, t, n])
        np.add.at(out["dv"], (b, seen, n // group), weights[:, None] * dy[b, t, n])
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("window", [-1, 4, 100])
@pytest.mark.parametrize("chunks", [1, 4])  # 11 keys in 4 chunks of 3: one fills up
def test_equals_a_loop_over_queries(heads, kv_heads, window, chunks):
    arrays = inputs(heads, kv_heads)
    ours = with_gradients(**arrays, query=places(), key=places(), window=jnp.int32(window), chunks=chunks)
    assert_trees_close(ours, by_loops(**arrays, query=places(), key=places(), window=window), "float32", "attention")


def test_a_window_of_one_copies_the_value_and_has_no_gradient_in_the_scores():
    arrays = inputs(4, 2)
    ours = with_gradients(**arrays, query=places(), key=places(), window=jnp.int32(1), chunks=1)
    assert_trees_close(ours, by_loops(**arrays, query=places(), key=places(), window=1), "float32", "attention")
    assert not np.asarray(ours["dq"]).any()
    chunked = with_gradients(**arrays, query=places(), key=places(), window=jnp.int32(1), chunks=4)
    for name, value in ours.items():  # in chunks a gradient of zero is a difference of two rounded sums
        np.testing.assert_allclose(chunked[name], value, atol=2e-5)


@pytest.mark.parametrize("chunks", [1, 3])
def test_bfloat16_inputs_are_scored_in_float32(chunks):
    arrays = inputs(4, 2, "bfloat16")
    ours = with_gradients(**arrays, query=places(), key=places(), window=jnp.int32(-1), chunks=chunks)
    assert {value.dtype for value in ours.values()} == {jnp.dtype(jnp.bfloat16)}
    assert_trees_close(ours, by_loops(**arrays, query=places(), key=places(), window=-1), "bfloat16", "attention")


@pytest.mark.parametrize("chunks", [1, 2, 11])
def test_a_query_without_any_key_gives_zero_and_no_gradient(chunks):
    """Keys 3 and 4 alone have the queries' document; the first three queries see nothing."""
    arrays = inputs(2, 1)
    segment = np.tile(np.isin(np.arange(LENGTH), (3, 4)) + 1, (2, 1))
    query, key = places(np.full_like(segment, 2)), places(segment)
    ours = with_gradients(**arrays, query=query, key=key, window=jnp.int32(-1), chunks=chunks)
    assert not np.asarray(ours["y"])[:, :3].any()
    assert not np.asarray(ours["dq"])[:, :3].any()
    assert_trees_close(ours, by_loops(**arrays, query=query, key=key, window=-1), "float32", "attention")


@pytest.mark.parametrize("chunks", [1, 3])
def test_scores_of_thousands_do_not_overflow(chunks):
    arrays = inputs(2, 2, scale=100.0)
    ours = with_gradients(**arrays, query=places(), key=places(), window=jnp.int32(-1), chunks=chunks)
    assert all(np.isfinite(value).all() for value in ours.values())


def test_keys_that_are_not_visible_have_no_influence():
    arrays = inputs(2, 2)
    run = functools.partial(with_gradients, query=places(), key=places(), window=jnp.int32(3), chunks=1)
    changed = arrays | {name: arrays[name].at[0, 2].add(5.0).at[1, 1].add(5.0) for name in ("k", "v")}
    is_same = (np.asarray(run(**arrays)["y"]) == np.asarray(run(**changed)["y"])).all(axis=(2, 3))
    # Row 0: key 2 is seen by queries 2 to 4 of its window. Row 1: key 1 by query 1 alone, the next document starts at 2.
    assert [np.flatnonzero(~row).tolist() for row in is_same] == [[2, 3, 4], [1]]


def test_queries_read_a_cache_with_room_for_later_keys():
    """Two queries at places 5 and 6 against 11 cache places give what the whole sequence gives there."""
    arrays, whole = inputs(4, 2), places(np.ones((2, LENGTH), int))
    y = attention(arrays["q"], arrays["k"], arrays["v"], whole, whole, window=3)
    some = Places(whole.place[:, 5:7], whole.segment[:, 5:7])
    part = attention(arrays["q"][:, 5:7], arrays["k"], arrays["v"], some, whole, window=jnp.int32(3))
    assert_trees_close({"y": part}, {"y": np.asarray(y)[:, 5:7]}, "float32", "cache")


def test_memory_grows_with_the_length_and_not_its_square():
    def temp_bytes(length):
        q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        at = Places(*(jax.ShapeDtypeStruct((1, length), jnp.int32) for _ in range(2)))
        step = jax.grad(lambda q, k, v, at: attention(q, k, v, at, at, window=-1).sum(), (0, 1, 2))
        return jax.jit(step).lower(q, q, q, at).compile().memory_analysis().temp_size_in_bytes

    assert 3 < temp_bytes(16384) / temp_bytes(4096) < 5


def test_heads_that_do_not_share_evenly_are_refused():
    arrays = inputs(3, 2)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key heads"):
        attention(arrays["q"], arrays["k"], arrays["v"], places(), places(), window=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("max_documents", [1, 5])
def test_cudnn_equals_the_definition_on_a_gpu(window, max_documents):
    rng, lengths = np.random.default_rng(0), ([512], [100, 1, 300, 111], [200, 150])  # the last row ends in padding
    segments = np.stack([np.pad(np.repeat(np.arange(1, len(n) + 1), n), (0, 512 - sum(n))) for n in lengths])
    at = places(np.minimum(segments, 1) if max_documents == 1 else segments)
    if choose_implementation(dtype=jnp.bfloat16, head_dim=64).name != "cudnn":
        pytest.skip("cuDNN attention does not run on this device")
    q, dy, k, v = (jnp.asarray(rng.normal(size=(3, 512, heads, 64)), jnp.bfloat16) for heads in (8, 8, 2, 2))
    dy = jnp.where((at.segment > 0)[:, :, None, None], dy, 0)  # no label is in the padding

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation):
        settings = {"window": window, "implementation": implementation, "max_documents": max_documents}
        y, pull = jax.vjp(lambda q, k, v: attention(q, k, v, at, at, **settings), q, k, v)
        return {"y": jnp.where((at.segment > 0)[:, :, None, None], y, 0)} | dict(zip(("dq", "dk", "dv"), pull(dy), strict=True))

    ours = jax.tree.map(lambda a: np.asarray(a, np.float32), run("cudnn"))
    assert_trees_close(ours, jax.tree.map(lambda a: np.asarray(a, np.float32), run("xla")), "bfloat16", "cudnn")


@pytest.mark.gpu
def test_too_many_documents_give_nan_on_a_gpu():
    if choose_implementation(dtype=jnp.bfloat16, head_dim=64).name != "cudnn":
        pytest.skip("cuDNN attention does not run on this device")
    at = places(np.stack([np.repeat([1, 2, 3, 4], 32), np.repeat([1, 2], 64)]))
    q = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
    y = jax.jit(lambda q: attention(q, q, q, at, at, window=-1, implementation="cudnn", max_documents=3))(q)
    is_nan = np.isnan(np.asarray(y, np.float32))
    assert is_nan[0, :96].all()  # nothing writes the fourth document
    assert not is_nan[1].any()
