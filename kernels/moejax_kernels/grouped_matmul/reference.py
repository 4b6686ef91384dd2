"""The definition of the grouped product and its two gradients, in plain jnp. Costs E times the FLOPs of a kernel."""

import jax
import jax.numpy as jnp

from moejax_kernels.grouped_matmul.layout import tile_experts


def matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r] in float32, [M, N]; rows past the last tile in use are zero."""
    member = _members(x.shape[0], group_sizes, tile)
    y = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
    for e in range(w.shape[0]):
        product = jnp.dot(x, w[e], preferred_element_type=jnp.float32)
        y = y + jnp.where(member[:, e, None], product, 0.0)
    return y


def matmul_transposed(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r].T in float32, [M, K]."""
    return matmul(x, jnp.swapaxes(w, 1, 2), group_sizes, tile)


def weight_gradient(x: jax.Array, dy: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """dw[e] = x[rows of e].T @ dy[rows of e] in float32, [E, K, N]; zero for an empty expert."""
    member = _members(x.shape[0], group_sizes, tile)

    def only(rows, e):
        return jnp.where(member[:, e, None], rows, jnp.zeros((), rows.dtype))

    # Both are masked: zero times a row of another expert that is not finite would not be zero.
    per_expert = [jnp.dot(only(x, e).T, only(dy, e), preferred_element_type=jnp.float32) for e in range(group_sizes.shape[0])]
    return jnp.stack(per_expert)


def _members(rows: int, group_sizes: jax.Array, tile: int) -> jax.Array:
    """Whether row r lies in a tile of expert e, bool [M, E]."""
    expert, in_use = tile_experts(group_sizes, rows // tile, tile)
    of_row = jnp.repeat(jnp.where(jnp.arange(rows // tile) < in_use, expert, -1), tile, total_repeat_length=rows)
    return of_row[:, None] == jnp.arange(group_sizes.shape[0])[None, :]
