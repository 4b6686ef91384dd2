"""The grouped product with its gradients."""

import functools
import math

import jax
import numpy as np

from moejax_kernels.grouped_matmul import cpu, reference
from moejax_kernels.grouped_matmul.choice import choose_implementation


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, tile: int, implementation: str = "auto") -> jax.Array:
    """Multiply each row by the matrix of its expert: y[r] = x[r] @ w[expert of r].

    Rows lie in the tile-aligned layout of `layout.py`; pad rows and rows past the last expert must be zero, and come
    out zero. Products accumulate in float32. Differentiable in x and w; the gradient of an expert without rows is
    exactly zero.

    Args:
        x: [M, K], M a multiple of the tile.
        w: [E, K, *N], the dtype of x. Several dims N count as one: a weight reshaped outside would be a residual of its own.
        group_sizes: int32 [E], real rows of each expert.
        tile: rows of a tile.
        implementation: "auto", "reference", "cpu" or "mosaic"; a name never falls back to another.

    Returns:
        [M, *N] in the dtype of x.

    Raises:
        NotImplementedError: if the implementation does not take this device, dtype, widths or tile.
    """
    if x.ndim != 2 or w.ndim < 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit [M K], [E K *N], [E]")
    if x.shape[0] % tile:
        raise ValueError(f"grouped_matmul: x has {x.shape[0]} rows, not a multiple of tile={tile}")
    if x.dtype != w.dtype:
        raise ValueError(f"grouped_matmul: x is {x.dtype} and w is {w.dtype}; cast one of them")
    choice = choose_implementation(implementation, dtype=x.dtype, widths=(w.shape[1], math.prod(w.shape[2:])), tile=tile)
    return _grouped(x, w, group_sizes, tile, choice.name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, w, group_sizes, tile, implementation):
    y = _body(implementation).matmul(x, _as_matrices(w), group_sizes, tile).astype(x.dtype)
    return y.reshape(x.shape[0], *w.shape[2:])


def _forward(x, w, group_sizes, tile, implementation):
    return _grouped(x, w, group_sizes, tile, implementation), (x, w, group_sizes)


def _backward(tile, implementation, residuals, dy):
    x, w, group_sizes = residuals
    body, dy = _body(implementation), dy.reshape(x.shape[0], -1)
    dx = body.matmul_transposed(dy, _as_matrices(w), group_sizes, tile).astype(x.dtype)
    dw = body.weight_gradient(x, dy, group_sizes, tile).astype(w.dtype).reshape(w.shape)
    return dx, dw, np.zeros(group_sizes.shape, jax.dtypes.float0)


_grouped.defvjp(_forward, _backward)


def _as_matrices(w):
    return w.reshape(*w.shape[:2], -1)


def _body(implementation):
    """The module of an implementation: matmul, matmul_transposed and weight_gradient of (a, b, group_sizes, tile).

    Their sums are float32, and so are their results, unless they round to the dtype of the operands themselves.
    """
    if implementation == "mosaic":
        from moejax_kernels.grouped_matmul import mosaic  # its imports take a second, and a CPU run never needs them

        return mosaic
    return {"reference": reference, "cpu": cpu}[implementation]
