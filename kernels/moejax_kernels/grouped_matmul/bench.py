"""Times of the grouped product beside the least that its work can cost: a dense product of the same rows, and the weights' traffic.

    pass       dense product of the same rows     expert weights read + written
    forward    x @ w                              1 + 0
    dgrad      dy @ w.T                           1 + 0
    wgrad      x.T @ dy                           0 + 1
    vjp        all three                          2 + 1

A pass that is not asked for is left out of the program by the compiler, so all four go through the public function.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.device import device_kind
from moejax_kernels.grouped_matmul.api import grouped_matmul
from moejax_kernels.grouped_matmul.choice import choose_implementation, choose_tile
from moejax_kernels.grouped_matmul.layout import align_up, buffer_rows
from moejax_kernels.timing import copying, interleaved_medians, overwriting

PATTERNS = ("even", "zipf", "one")
WEIGHT_PASSES = {"forward": 1, "dgrad": 1, "wgrad": 1, "vjp": 3}
"""By pass: how often all expert weights are read or written."""
_PRODUCTS = {"forward": 1, "dgrad": 1, "wgrad": 1, "vjp": 3}
_COPY_BYTES = 128 * 2**20  # more than the caches of a CPU or GPU hold


@dataclass(frozen=True)
class Case:
    """One problem: [rows, k] x [experts, k, n] with rows split over the experts by a pattern."""

    rows: int
    k: int
    n: int
    experts: int
    dtype: str
    pattern: Literal["even", "zipf", "one"]


def group_sizes(rows: int, experts: int, pattern: str) -> np.ndarray:
    """Rows of each expert, int32 [E], summing to rows.

    even: equal to within one row. zipf: the i-th busiest expert has a share of 1/i, in an order that hashes the index.
    one: every row in the middle expert.
    """
    if pattern == "one":
        return np.where(np.arange(experts) == experts // 2, rows, 0).astype(np.int32)
    shares = np.ones(experts) if pattern == "even" else 1 / np.arange(1, experts + 1)
    edges = np.round(np.cumsum(shares / shares.sum()) * rows).astype(np.int64)
    sizes = np.diff(edges, prepend=0).astype(np.int32)
    return sizes if pattern == "even" else sizes[np.random.default_rng(0).permutation(experts)]


def measure(case: Case, implementations: Iterable[str], *, passes: Iterable[str] = tuple(WEIGHT_PASSES), repeats: int = 15) -> list[dict]:
    """One flat dict for each implementation and pass; everything of the case is timed in one interleaved run.

    `ratio` is the time over (dense_s + weights_s); copy_bytes_per_s counts bytes read and bytes written.

    Raises:
        NotImplementedError, ValueError: if an implementation does not run here or is unknown.
    """
    passes = tuple(passes)
    choices = [choose_implementation(name, dtype=case.dtype, widths=(case.k, case.n)) for name in implementations]
    names = tuple(dict.fromkeys(choice.name for choice in choices))
    sizes = group_sizes(case.rows, case.experts, case.pattern)
    tile = choose_tile()
    dense = _dense_arrays(case)
    arrays = _arrays(case, sizes, tile, *dense)
    programs: dict[str, Callable[[], object]] = {"copy": copying(_COPY_BYTES)}
    for part in passes:
        programs[f"dense {part}"] = overwriting(functools.partial(_dense, part), *dense)
        for name in names:
            programs[f"{name} {part}"] = overwriting(functools.partial(_grouped, part, tile, name), *arrays)
    seconds = interleaved_medians(programs, repeats)
    rate = 2 * _COPY_BYTES / seconds["copy"]
    about = {"tile": tile, "padded_rows": int(align_up(sizes, tile).sum()), "copy_bytes_per_s": rate, "repeats": repeats}
    about |= {"device": device_kind(), "jax": jax.__version__}
    return [
        asdict(case)
        | {"implementation": name, "pass": part}
        | _times(case, part, seconds[f"{name} {part}"], seconds[f"dense {part}"], rate)
        | about
        for name in names
        for part in passes
    ]


def _times(case: Case, part: str, time_s: float, dense_s: float, rate: float) -> dict[str, float]:
    weights_s = WEIGHT_PASSES[part] * case.experts * case.k * case.n * jnp.dtype(case.dtype).itemsize / rate
    return {
        "seconds": time_s,
        "dense_s": dense_s,
        "weights_s": weights_s,
        "ratio": time_s / (dense_s + weights_s),
        "ratio_to_dense": time_s / dense_s,
        "flops_per_s": 2 * _PRODUCTS[part] * case.rows * case.k * case.n / time_s,
    }


def _dense_arrays(case: Case):
    """x, w and dy of one product of all real rows."""
    x, w, dy = jax.random.split(jax.random.key(0), 3)
    shapes = ((x, (case.rows, case.k)), (w, (case.k, case.n)), (dy, (case.rows, case.n)))
    return tuple(jax.random.normal(key, shape, case.dtype) for key, shape in shapes)


def _arrays(case: Case, sizes: np.ndarray, tile: int, x, w, dy):
    """The same rows in the tile-aligned layout with zero pad rows, the weights once for each expert, and group_sizes."""
    starts = np.cumsum(align_up(sizes, tile)) - align_up(sizes, tile)
    real = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    buffer = buffer_rows(case.rows, case.experts, tile)
    x, dy = (jnp.zeros((buffer, rows.shape[1]), rows.dtype).at[real].set(rows) for rows in (x, dy))
    return x, jnp.tile(w, (case.experts, 1, 1)), dy, jnp.asarray(sizes)


def _grouped(name: str, tile: int, implementation: str, x, w, dy, sizes):
    return _one_pass(name, lambda x, w: grouped_matmul(x, w, sizes, tile=tile, implementation=implementation), x, w, dy)


def _dense(name: str, x, w, dy):
    return _one_pass(name, jnp.dot, x, w, dy)


def _one_pass(name: str, product: Callable, x, w, dy):
    """The results of a pass; the compiler leaves out what they do not need."""
    y, pullback = jax.vjp(product, x, w)
    dx, dw = pullback(dy)
    return {"forward": y, "dgrad": dx, "wgrad": dw, "vjp": (y, dx, dw)}[name]
