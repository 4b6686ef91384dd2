"""Causal grouped-query attention with sliding windows and document masks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30  # finite, so that a row with no visible key gives a uniform softmax instead of NaN


def attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], visible: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """Softmax attention over the visible keys; query head n reads key head n // (N / K). Scores and softmax are float32."""
    b, t, n, h = q.shape
    heads = k.shape[2]
    grouped = q.reshape(b, t, heads, n // heads, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def visible_keys(
    query_index: Int[Array, "B T"],
    key_index: Int[Array, "B S"],
    query_segment: Int[Array, "B T"],
    key_segment: Int[Array, "B S"],
    window: Int[Array, ""],
) -> Bool[Array, "B T S"]:
    """Which keys a query sees: itself and earlier, in its own document, and fewer than `window` tokens back (window <= 0: any).

    The index is the place in the sequence, not the position that rotary embedding uses.
    """
    distance = query_index[:, :, None] - key_index[:, None, :]
    same_document = query_segment[:, :, None] == key_segment[:, None, :]
    return (distance >= 0) & same_document & ((distance < window) | (window <= 0))
