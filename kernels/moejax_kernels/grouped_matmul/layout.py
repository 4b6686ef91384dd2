"""The tile-aligned layout: every expert's rows start at a multiple of the tile, and pad rows are zero.

    tile = 4, group_sizes = [3, 0, 5]        row  0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 ...
                                             exp  0 0 0 . | 2 2 2 2 | 2 . .  .  | unused

No tile holds rows of two experts, so kernels need no masks. An empty expert takes no rows.
"""

import jax
import jax.numpy as jnp


def align_up(n, tile: int):
    """The smallest multiple of the tile that is >= n; n may be an int or an integer array."""
    return (n + tile - 1) // tile * tile


def buffer_rows(rows: int, num_experts: int, tile: int) -> int:
    """Rows of a buffer that holds any split of `rows` real rows over the experts."""
    return align_up(align_up(rows, tile) + num_experts * (tile - 1), tile)


def aligned_starts(group_sizes: jax.Array, tile: int) -> jax.Array:
    """First row of each expert, int32 [E]."""
    padded = align_up(group_sizes.astype(jnp.int32), tile)
    return jnp.cumsum(padded) - padded


def tile_experts(group_sizes: jax.Array, num_tiles: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """The expert of each of the `num_tiles` tiles, int32 [num_tiles], and how many tiles are in use, int32 []."""
    ends = jnp.cumsum(align_up(group_sizes.astype(jnp.int32), tile)) // tile
    expert = jnp.sum(jnp.arange(num_tiles, dtype=jnp.int32)[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    return jnp.minimum(expert, group_sizes.shape[0] - 1), ends[-1]
