"""The definition of attention, in plain jnp: a softmax over the keys in chunks, so that memory grows with the length and not its square.

    keys      |  chunk 0  |  chunk 1  |  chunk 2  |        scores of all queries against one chunk exist at once
    per query  running maximum m, sum l of exp(score - m), and weighted sum of values, rescaled when m grows

The gradient computes the scores of each chunk again from the saved logsumexp (Dao et al. 2022). Runs anywhere, in any dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from moejax_kernels.attention.places import Places, visible_keys

RESIDUAL = "attention"
"""Checkpoint name of the result and the logsumexp: with them the backward pass needs no second forward pass."""

_MASKED = -1e30
_LOWEST = -1e29  # of a running maximum: exp(_MASKED - _LOWEST) is zero, so a query that sees nothing has weights of zero
_TINY = float(np.finfo(np.float32).tiny)
_CHUNK = 512  # keys of a chunk, and more where there are few queries: 2**20 scores a head
_CHUNK_SCORES = 2**20


def attention(q: jax.Array, k: jax.Array, v: jax.Array, query: Places, key: Places, window: ArrayLike) -> jax.Array:
    """Attention as `api.attention` defines it."""
    chunks = -(-k.shape[1] // max(_CHUNK, _CHUNK_SCORES // q.shape[1]))
    return chunked_attention(q, k, v, query, key, jnp.asarray(window, jnp.int32), chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def chunked_attention(q, k, v, query, key, window, chunks):
    """Attention with the keys in that many chunks of equal length; one chunk needs no loop."""
    return _forward(q, k, v, query, key, window, chunks)[0]


def _forward(q, k, v, query, key, window, chunks):
    queries = _by_head(q, k.shape[2])

    def add(carry, chunk):
        highest, total, y = carry
        chunk_k, chunk_v, chunk_key = chunk
        scores = _scores(queries, chunk_k, query, chunk_key, window)
        new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - new)
        kept = jnp.exp(highest - new)
        values = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), chunk_v, preferred_element_type=jnp.float32)
        return (new, total * kept + weights.sum(axis=-1, keepdims=True), y * kept + values), None

    row = jnp.zeros((*queries.shape[:4], 1), jnp.float32)
    start = row + _LOWEST, row, jnp.zeros(queries.shape, jnp.float32)
    highest, total, y = _over_chunks(add, start, _chunked(k, v, key, chunks))[0]
    total = jnp.maximum(total, _TINY)
    y = checkpoint_name(_by_token(y / total).astype(q.dtype), RESIDUAL)
    logsumexp = checkpoint_name(highest + jnp.log(total), RESIDUAL)
    return y, (q, k, v, query, key, window, y, logsumexp)


def _backward(chunks, residuals, dy):
    q, k, v, query, key, window, y, logsumexp = residuals
    queries, dys = _by_head(q, k.shape[2]), _by_head(dy, k.shape[2])
    mean = (dys.astype(jnp.float32) * _by_head(y, k.shape[2])).sum(axis=-1, keepdims=True)  # of dweights under the weights
    scale = q.shape[3] ** -0.5

    def add(dq, chunk):
        chunk_k, chunk_v, chunk_key = chunk
        weights = jnp.exp(_scores(queries, chunk_k, query, chunk_key, window) - logsumexp)
        if chunks == 1:
            weights /= jnp.maximum(weights.sum(axis=-1, keepdims=True), _TINY)
        dv = jnp.einsum("bkgts,bkgth->bksh", weights.astype(dy.dtype), dys, preferred_element_type=jnp.float32)
        dweights = jnp.einsum("bkgth,bksh->bkgts", dys, chunk_v, preferred_element_type=jnp.float32)
        if chunks > 1:
            center = mean
        else:  # all keys are here: the same without rounding errors of the logsumexp, and exactly zero for a query that sees one key
            center = (weights * dweights).sum(axis=-1, keepdims=True)
        dscores = weights * (dweights - center) * scale
        dq += jnp.einsum("bkgts,bksh->bkgth", dscores, chunk_k.astype(jnp.float32))
        dk = jnp.einsum("bkgts,bkgth->bksh", dscores, queries.astype(jnp.float32))
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    dq, parts = _over_chunks(add, jnp.zeros(queries.shape, jnp.float32), _chunked(k, v, key, chunks))
    dk, dv = (_joined(part)[:, : k.shape[1]] for part in parts)
    return _by_token(dq).astype(q.dtype), dk, dv, *jax.tree.map(_no_gradient, (query, key, window))


chunked_attention.defvjp(_forward, _backward)


def _scores(queries, chunk_k, query, chunk_key, window):
    """float32 [B, K, N/K, T, keys of the chunk]."""
    scores = jnp.einsum("bkgth,bksh->bkgts", queries, chunk_k, preferred_element_type=jnp.float32) * queries.shape[-1] ** -0.5
    return jnp.where(visible_keys(query, chunk_key, window)[:, None, None], scores, _MASKED)


def _over_chunks(add, start, chunks):
    """lax.scan, without a loop where there is one chunk."""
    if chunks[0].shape[0] > 1:
        return lax.scan(add, start, chunks)
    carry, out = add(start, jax.tree.map(lambda a: a[0], chunks))
    return carry, jax.tree.map(lambda a: a[None], out)


def _chunked(k, v, key, chunks):
    """k, v [chunks, B, K, keys, H] and the keys' places [chunks, B, keys]; a key that fills up belongs to no document."""
    length = -(-k.shape[1] // chunks)
    fill = length * chunks - k.shape[1]

    def cut(a, value=0):
        a = jnp.pad(a, ((0, 0), (0, fill), *((0, 0) for _ in a.shape[2:])), constant_values=value) if fill else a
        return jnp.moveaxis(a.reshape(a.shape[0], chunks, length, *a.shape[2:]), 1, 0)

    return *(jnp.swapaxes(cut(a), 2, 3) for a in (k, v)), Places(cut(key.place), cut(key.segment, -1))


def _joined(parts):
    """[chunks, B, K, keys, H] -> [B, chunks x keys, K, H]."""
    count, rows, heads, length, dim = parts.shape
    return parts.transpose(1, 0, 3, 2, 4).reshape(rows, count * length, heads, dim)


def _by_head(x, heads):
    """[B, T, N, H] -> [B, K, N/K, T, H], the order in which batched products read it."""
    return x.reshape(*x.shape[:2], heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _by_token(x):
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _no_gradient(integers):
    return np.zeros(integers.shape, jax.dtypes.float0)
