"""The Mosaic GPU bodies: tables for the kernels, and the kernel of the GPU generation that is being traced for.

What would cost a pass over memory afterwards is done by the kernels themselves. They write zeros to rows past the last tile in use,
where a mask would read and write all rows. They round the float32 sums to the dtype of the operands, which are the same bits as a
float32 result and a cast, for 2 bytes an element instead of 10.
"""

import jax
import jax.numpy as jnp

from moejax_kernels.device import gpu_generation, num_cores
from moejax_kernels.grouped_matmul import mosaic_sm90, mosaic_sm100
from moejax_kernels.grouped_matmul.layout import align_up, aligned_starts, tile_experts
from moejax_kernels.grouped_matmul.shapes import Kind, Product

_KERNELS = {"sm90": mosaic_sm90, "sm100": mosaic_sm100}


def matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r], [M, N] in the dtype of x; rows past the last tile in use are zero."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype)
    return _run("forward", x, w, _tile_tables(group_sizes, x.shape[0], tile), out, contracted=w.shape[1])


def matmul_transposed(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r].T, [M, K] in the dtype of x, without a transposed copy of the weights."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return _run("dgrad", x, w, _tile_tables(group_sizes, x.shape[0], tile), out, contracted=w.shape[2])


def weight_gradient(x: jax.Array, dy: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """dw[e] = x[rows of e].T @ dy[rows of e], [E, K, N] in the dtype of x; zero for an empty expert."""
    padded = align_up(group_sizes.astype(jnp.int32), tile)
    out = jax.ShapeDtypeStruct((group_sizes.shape[0], x.shape[1], dy.shape[1]), x.dtype)
    return _run("wgrad", x, dy, (aligned_starts(group_sizes, tile), padded), out, contracted=x.shape[0])


def _tile_tables(group_sizes, rows: int, tile: int):
    experts, in_use = tile_experts(group_sizes, rows // tile, tile)
    return experts, in_use[None]


def _run(kind: Kind, a, b, tables, out: jax.ShapeDtypeStruct, *, contracted: int) -> jax.Array:
    generation = gpu_generation()
    assert generation is not None, "choose_implementation takes mosaic only on these GPUs"
    kernel = _KERNELS[generation]
    product = Product(kind=kind, out=out, experts=b.shape[0] if kind != "wgrad" else out.shape[0], contracted=contracted, tile=kernel.TILE)
    return kernel.grouped_product(product, tables, a, b, num_cores=num_cores())
