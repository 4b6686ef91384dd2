"""Attention with its gradients, checked."""

import jax
from jaxtyping import Array, Float

from moejax_kernels.attention import xla
from moejax_kernels.attention.places import Places


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query: Places,
    key: Places,
    *,
    window: jax.Array | int,
) -> Float[Array, "B T N H"]:
    """Softmax attention of each query over the keys that it sees; query head n reads key head n // (N / K).

    A query sees itself and earlier places of its document, fewer than `window` back (<= 0: any). One that sees no key gives zero.
    Scores are divided by sqrt(H); scores and softmax are float32. Differentiable in q, k and v. Sizes are local.

    Args:
        query, key: places and documents of the queries [B, T] and of the keys [B, S].
        window: int32 scalar.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    return xla.attention(q, k, v, query, key, window)
