"""The grouped product with its gradients, and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.device import platform
from moejax_kernels.grouped_matmul import cpu, reference

_IMPLEMENTATIONS = ("reference", "cpu")


def choose_implementation(name: str = "auto") -> str:
    """The implementation to use on the device that is being traced for.

    Raises:
        NotImplementedError: if `name` does not run on that device, or "auto" finds nothing that does.
        ValueError: if `name` is unknown.
    """
    device = platform()
    if name == "auto":
        if device == "cpu":
            return "cpu"
        raise NotImplementedError(
            f"grouped_matmul has no kernel for platform {device!r}; run on CPU, or ask for the slow definition with "
            "grouped_matmul='reference'"
        )
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"grouped_matmul={name!r} is not one of auto, {', '.join(_IMPLEMENTATIONS)}")
    if name == "cpu" and device != "cpu":
        raise NotImplementedError(f"grouped_matmul='cpu' was asked for on platform {device!r}; use 'auto' or 'reference'")
    return name


def choose_tile(rows_per_expert: float) -> int:
    """Tile for the device being traced for: 128 on accelerators; on CPU a power of two from 8 to 128.

    The CPU tile follows the expected rows of one expert, so that small groups are not mostly padding.
    """
    if platform() != "cpu":
        return 128
    tile = 8
    while tile < 128 and tile * 8 <= rows_per_expert:
        tile *= 2
    return tile


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, tile: int, implementation: str = "auto") -> jax.Array:
    """Multiply each row by the matrix of its expert: y[r] = x[r] @ w[expert of r].

    Rows lie in the tile-aligned layout of `layout.py`; pad rows and rows past the last expert must be zero, and come
    out zero. Products accumulate in float32. Differentiable in x and w; the gradient of an expert without rows is
    exactly zero.

    Args:
        x: [M, K], M a multiple of the tile.
        w: [E, K, N], the dtype of x.
        group_sizes: int32 [E], real rows of each expert.
        tile: rows of a tile.
        implementation: "auto", "reference" or "cpu"; a name never falls back to another.

    Returns:
        [M, N] in the dtype of x.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit [M K], [E K N], [E]")
    if x.shape[0] % tile:
        raise ValueError(f"grouped_matmul: x has {x.shape[0]} rows, not a multiple of tile={tile}")
    if x.dtype != w.dtype:
        raise ValueError(f"grouped_matmul: x is {x.dtype} and w is {w.dtype}; cast one of them")
    return _grouped(x, w, group_sizes, tile, choose_implementation(implementation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, w, group_sizes, tile, implementation):
    body = cpu.matmul if implementation == "cpu" else reference.matmul
    return body(x, w, group_sizes, tile).astype(x.dtype)


def _forward(x, w, group_sizes, tile, implementation):
    return _grouped(x, w, group_sizes, tile, implementation), (x, w, group_sizes)


def _backward(tile, implementation, residuals, dy):
    x, w, group_sizes = residuals
    if implementation == "cpu":
        dx = cpu.matmul_transposed(dy, w, group_sizes, tile)
        dw = cpu.weight_gradient(x, dy, group_sizes, tile)
    else:
        dx = reference.matmul(dy, jnp.swapaxes(w, 1, 2), group_sizes, tile)
        dw = reference.weight_gradient(x, dy, group_sizes, tile)
    return dx.astype(x.dtype), dw.astype(w.dtype), np.zeros(group_sizes.shape, jax.dtypes.float0)


_grouped.defvjp(_forward, _backward)
