"""Attention by cuDNN's fused kernels: no scores in memory, forward or backward. Self-attention of whole sequences in bfloat16.

Sequences of one document go through JAX's public function; its mask argument, which would become an S x S bias, is never used:
documents are told apart by the packed layout of `documents.py`.
"""

from typing import Any, cast

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels.attention import documents
from moejax_kernels.attention.xla import RESIDUAL


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *, window: int, max_documents: int) -> jax.Array:
    """Attention as `api.attention` defines it, of queries and keys at the same places 0, 1, ..., T - 1."""
    near = window if 0 < window < q.shape[1] else None
    if max_documents == 1:
        return _attention(q, k, v, None, near)
    packed, fits = documents.pack(segment, max_documents)
    return _attention(q, documents.refuse(k, fits), v, packed, near)


def _compute(q, k, v, packed, window):
    if packed is not None:
        return documents.packed_attention(q, k, v, packed, window)
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")


# JAX's own derivative, with names on its residuals, so that recomputation can keep them.
_attention = jax.custom_vjp(_compute, nondiff_argnums=(4,))


def _forward(q, k, v, packed, window):
    y, function = jax.vjp(lambda q, k, v: _compute(q, k, v, packed, window), q, k, v)
    pullback = cast(Any, function)
    kept = pullback.opaque_residuals  # beside q, k and v: the result, the logsumexp and the tables
    named = [checkpoint_name(a, RESIDUAL) if a.size else a for a in kept]
    y = next((new for new, old in zip(named, kept, strict=True) if old is y), y)
    return y, pullback.replace(opaque_residuals=named)


def _backward(window, pullback, dy):
    return *pullback(dy), None


_attention.defvjp(_forward, _backward)
