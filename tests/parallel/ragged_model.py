"""What XLA's ragged all-to-all does, as its documentation says, on any device: a model for tests where there is no GPU."""

import jax
import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Chunk j of peer p goes from input_offsets[p, j] here to output_offsets[p, j] in p's output; other rows of output stay.

    What the real operation leaves undefined gives NaN: chunks that leave the operand or the output, that overlap, or whose
    sizes the two sides do not agree on.
    """
    me, ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
    tables = lax.all_gather(jnp.stack([input_offsets, send_sizes, output_offsets]), axis_name)
    source_offset, size, offset = tables.reshape(ranks, 3, ranks, -1)[:, :, me].transpose(1, 0, 2)  # [source, chunk] each
    operands = lax.all_gather(operand, axis_name)
    fits = (source_offset >= 0) & (source_offset + size <= operand.shape[0]) & (offset >= 0) & (offset + size <= output.shape[0])
    is_legal = jnp.all(fits | (size == 0)) & jnp.all(size.reshape(-1) == recv_sizes) & jnp.all(size >= 0)

    row = jnp.arange(output.shape[0])[:, None, None]
    holds = (row >= offset[None]) & (row < (offset + size)[None])  # [row, source, chunk]
    writers = holds.sum(axis=(1, 2))
    flat = holds.reshape(output.shape[0], -1).argmax(axis=1)
    source, chunk = flat // size.shape[1], flat % size.shape[1]
    place = source_offset[source, chunk] + row[:, 0, 0] - offset[source, chunk]
    received = jnp.where((writers > 0)[:, None], operands[source, jnp.clip(place, 0, operand.shape[0] - 1)], output)
    return jnp.where(is_legal & jnp.all(writers <= 1), received, jnp.nan)
