"""Attention with its gradients, checked."""

import jax
from jaxtyping import Array, Float

from moejax_kernels.attention import cudnn, xla
from moejax_kernels.attention.choice import Implementation
from moejax_kernels.attention.places import Places


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query: Places,
    key: Places,
    *,
    window: jax.Array | int,
    implementation: Implementation = "xla",
    max_documents: int | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention of each query over the keys that it sees; query head n reads key head n // (N / K).

    A query sees itself and earlier places of its document, fewer than `window` back (<= 0: any). One that sees no key gives zero.
    Scores are divided by sqrt(H); scores and softmax are float32. Differentiable in q, k and v. Sizes are local.

    Args:
        query, key: places and documents of the queries [B, T] and of the keys [B, S].
        window: int32 scalar; cudnn needs a number.
        implementation: as `choose_implementation` gives it; cudnn takes whole sequences, each token at its own place and a document in
            one piece.
        max_documents: cudnn only: documents of a sequence, its padding counted as one; 1 if segments need not be looked at. A sequence
            with more of them gives NaN.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads")
    if implementation == "xla":
        return xla.attention(q, k, v, query, key, window)
    if not isinstance(window, int):
        raise ValueError("attention: cudnn compiles the window into the kernel; give a number, not an array")
    if max_documents is None:
        raise ValueError("attention: cudnn needs max_documents, the most documents of a sequence; 1 for causal attention without documents")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"attention: cudnn takes whole sequences, not {q.shape[1]} queries of {k.shape[1]} keys; use xla with a cache")
    return cudnn.attention(q, k, v, query.segment, window=window, max_documents=max_documents)
