"""The CPU body: one batched product over all experts with C rows each, then a loop over the rows that experts have beyond C.

    C = 4, chunks of 2        rows       a a a b b b b b b b c        sorted by expert, which own 3, 7 and 1 of them
                              batch      a a a . | b b b b | c . . .  as [experts, C]
                              chunks     b b | b .                    two rows each, several chunks a step

XLA runs a batched product on all cores and reads every weight once; the body of a loop runs on one core and copies the weights of
each chunk. C is what random routing fills, so the loop is for the experts that are busier than that. If few experts have rows, the
loop is cheaper alone; that is decided at run time, and a buffer without rows costs next to nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax_kernels.grouped_matmul.layout import align_up, aligned_starts, tile_experts

_CHUNK = 64  # rows
_LANES = 2  # chunks of one step
_FORWARD, _TRANSPOSED, _GRADIENT = "erk,ekn->ern", "ern,ekn->erk", "ekr,ern->ekn"


class _Split(NamedTuple):
    """How the rows of each expert are shared between the batch and the chunks.

    start, batched: int32 [E], first row of each expert, and how many rows the batch takes of it. capacity: C.
    is_batched: bool [], whether there is a batch at all.
    chunks: int32 [chunks, 3], each one's expert, first row, and row where it has to end. steps: int32 [].
    """

    start: jax.Array
    batched: jax.Array
    capacity: int
    is_batched: jax.Array
    chunks: jax.Array
    steps: jax.Array


def matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r] in float32, [M, N]; rows past the last tile in use are zero."""
    return _product(_FORWARD, x, w, group_sizes, tile)


def matmul_transposed(x: jax.Array, w: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """y[r] = x[r] @ w[expert of r].T in float32, [M, K], without a transposed copy of the weights."""
    return _product(_TRANSPOSED, x, w, group_sizes, tile)


def weight_gradient(x: jax.Array, dy: jax.Array, group_sizes: jax.Array, tile: int) -> jax.Array:
    """dw[e] = x[rows of e].T @ dy[rows of e] in float32, [E, K, N]; zero for an empty expert."""
    split = _split(group_sizes, x.shape[0], tile)
    dw = _if_batched(split, _outer, _batch(x, split), _batch(dy, split))

    def add_chunks(step, dw):
        expert, first, is_own = _chunks(step, split, x.shape[0])
        products = _outer(_slices(x, first, is_own), _slices(dy, first, is_own))
        for lane in range(_LANES):
            before = lax.dynamic_index_in_dim(dw, expert[lane], keepdims=False)
            dw = lax.dynamic_update_index_in_dim(dw, before + products[lane], expert[lane], 0)
        return dw

    return lax.fori_loop(0, split.steps, add_chunks, dw)


def _product(formula, x, w, group_sizes, tile):
    rows = x.shape[0]
    split = _split(group_sizes, rows, tile)
    batch = _if_batched(split, lambda x, w: _einsum(formula, x, w), _batch(x, split), w)
    row = jnp.arange(rows, dtype=jnp.int32)
    expert = tile_experts(group_sizes, rows // tile, tile)[0][row // tile]
    place = row - split.start[expert]
    index = expert * split.capacity + jnp.minimum(place, split.capacity - 1)
    y = _rows_where(place < split.batched[expert], batch.reshape(-1, batch.shape[2]), index)

    def put_chunks(step, y):
        expert, first, is_own = _chunks(step, split, rows)
        products = _einsum(formula, _slices(x, first, is_own), w.at[expert].get(mode="promise_in_bounds"))
        for lane in range(_LANES):
            before = lax.dynamic_slice_in_dim(y, first[lane], is_own.shape[1])
            y = lax.dynamic_update_slice_in_dim(y, jnp.where(is_own[lane][:, None], products[lane], before), first[lane], 0)
        return y

    return lax.fori_loop(0, split.steps, put_chunks, y)


def _split(group_sizes, rows, tile):
    size, count = group_sizes.astype(jnp.int32), group_sizes.shape[0]
    start = aligned_starts(size, tile)
    mean = max(rows - count * (tile - 1), 1) / count
    capacity = align_up(math.ceil(mean + 2 * math.sqrt(mean)), 8)  # two standard deviations of random routing; 8 is a vector
    alone, beyond = ((jnp.maximum(size - taken, 0) + _CHUNK - 1) // _CHUNK for taken in (0, capacity))
    # Measured, widths 256: an expert of the batch costs a third of a chunk for its weights, and its rows a third as much as a chunk's.
    batch_cost = int(count * 0.35 * (1 + capacity / _CHUNK))
    is_batched = alone.sum() > batch_cost + beyond.sum()
    batched = jnp.where(is_batched, jnp.minimum(size, capacity), 0)

    # Chunks of one expert follow each other; those past the last one end before they begin.
    end = jnp.cumsum(jnp.where(is_batched, beyond, alone))
    index = jnp.arange(align_up(rows // _CHUNK + count, _LANES), dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), count - 1)
    inside = index - jnp.where(expert > 0, end[expert - 1], 0)
    chunks = jnp.stack([expert, (start + batched)[expert] + inside * _CHUNK, (start + size)[expert]], axis=1)
    return _Split(start, batched, capacity, is_batched, chunks, (end[-1] + _LANES - 1) // _LANES)


def _if_batched(split, product, *operands):
    """The batched product, or zeros of its shape at no cost if there is no batch."""
    shape = jax.eval_shape(product, *operands).shape
    return lax.cond(split.is_batched, product, lambda *_: jnp.zeros(shape, jnp.float32), *operands)


def _batch(x, split):
    """The first C rows of each expert, [E, C, width], zero where it has fewer."""
    place = jnp.arange(split.capacity, dtype=jnp.int32)[None, :]
    index = jnp.minimum(split.start[:, None] + place, x.shape[0] - 1)
    return _rows_where(place < split.batched[:, None], x, index)


def _chunks(step, split, rows):
    """Experts of a step's chunks, [LANES], the first row of the slice that holds each, and which rows of it are the chunk's own."""
    chunks = lax.dynamic_slice_in_dim(split.chunks, step * _LANES, _LANES)
    length = min(_CHUNK, rows)
    first = jnp.clip(chunks[:, 1], 0, rows - length)
    row = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    return chunks[:, 0], first, (row >= chunks[:, 1:2]) & (row < chunks[:, 2:])


def _slices(x, first, is_own):
    """Rows from each of `first` on, [LANES, length, width], zero where they are not the chunk's own."""
    return _rows_where(is_own, x, first[:, None] + jnp.arange(is_own.shape[1], dtype=jnp.int32)[None, :])


def _rows_where(wanted, x, index):
    """The rows of x at these places, zero where they are not wanted."""
    picked = x.at[index].get(mode="promise_in_bounds")
    return jnp.where(jnp.expand_dims(wanted, -1), picked, jnp.zeros((), x.dtype))


def _einsum(formula, a, b):
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _outer(x, dy):
    """x.T @ dy for each entry. Transposed by a copy: XLA's fast CPU product takes only operands that end in the summed dim."""
    return _einsum(_GRADIENT, lax.optimization_barrier(jnp.swapaxes(x, 1, 2)), dy)
