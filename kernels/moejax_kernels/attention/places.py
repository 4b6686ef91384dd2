"""Where tokens stand, and which keys a query sees because of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool


class Places(NamedTuple):
    """int32 [B, T] each. place: index in the sequence, not the position that rotary embedding uses. segment: the document, >= 0."""

    place: jax.Array
    segment: jax.Array


def visible_keys(query: Places, key: Places, window: ArrayLike) -> Bool[Array, "B T S"]:
    """Which keys a query sees: itself and earlier, in its own document, and fewer than `window` tokens back (window <= 0: any)."""
    distance = query.place[:, :, None] - key.place[:, None, :]
    same_document = query.segment[:, :, None] == key.segment[:, None, :]
    window = jnp.asarray(window, jnp.int32)
    return (distance >= 0) & same_document & ((distance < window) | (window <= 0))
