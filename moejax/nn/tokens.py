"""What every layer may know about the tokens that it works on."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """The local tokens of one microbatch, [B, T] each; built by `tokens_of`.

    segment: int32, 0 is padding, documents count from 1. position: int32, for rotary embedding.
    place: int32, index in the sequence, for masks. index: int32, global token index within the batch of the step, the same on every mesh.
    seed, step: int32 scalars, for random routing.
    max_documents: static; documents of a sequence at most, padding counted as one. 1: masks need not look at segments. None: unknown.
    """

    segment: Array
    position: Array
    place: Array
    index: Array
    seed: Array
    step: Array
    max_documents: int | None = field(default=None, metadata={"static": True})

    @property
    def valid(self) -> Array:
        """bool [B, T], False for padding."""
        return self.segment > 0


def tokens_of(
    segment: Array, position: Array, *, first_row: Array | int, seed: int, step: Array, max_documents: int | None = None
) -> Tokens:
    """Tokens of consecutive rows of the global batch, from row `first_row` on."""
    rows, length = segment.shape
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], segment.shape)
    row = jnp.asarray(first_row, jnp.int32) + jnp.arange(rows, dtype=jnp.int32)
    return Tokens(segment, position, place, row[:, None] * length + place, jnp.int32(seed), step, max_documents)
