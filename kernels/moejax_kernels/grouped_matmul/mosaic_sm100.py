"""Blackwell: TMA copies in, tcgen05.mma into tensor memory, TMA copies out. All SMs walk over every num_cores-th piece of the result.

    warpgroup 0, warp 0   TMA: blocks of A and B of every step into a ring of `stages` slots of shared memory
    warpgroup 0, warp 1   tcgen05.mma 128 x 128 x 64 of every step into one of two accumulators in tensor memory
    warpgroup 1           accumulator -> registers -> shared memory -> TMA store, while the next piece fills the other accumulator

    full[slot]       TMA -> MMA     both blocks of the step have landed
    empty[slot]      MMA -> TMA     the tensor core has read the slot
    done[acc]        MMA -> store   the piece is complete
    free[acc]        store -> MMA   the accumulator has been read

Every thread counts the steps and accumulators of the pieces before, so slots and barrier phases agree although pieces have
different numbers of steps. A piece without steps touches neither: the store writes zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax_kernels.grouped_matmul.shapes import Piece, Product, TileConfig

TILE = TileConfig(rows=128, cols=128, depth=64, stages=6)  # 192 KiB of operands and 32 KiB of results in shared memory
_ACCUMULATORS = 2
_STORE_BYTES = 128  # a store takes as many columns as this is wide: one swizzled row


class _Scratch(NamedTuple):
    a_smem: Any
    b_smem: Any
    out_smem: Any
    acc_tmem: Any
    full: Any
    empty: Any
    done: Any
    free: Any


def grouped_product(product: Product, tables: tuple[jax.Array, jax.Array], a: jax.Array, b: jax.Array, *, num_cores: int) -> jax.Array:
    """The product of `shapes.py` with tables int32 as made in `mosaic.py`; accumulates in float32."""

    def body(first_table_gmem, second_table_gmem, a_gmem, b_gmem, out_gmem, *scratch_refs):
        scratch = _Scratch(*scratch_refs)
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.nd_loop((product.num_pieces,), collective_axes="sm", init_carry=(jnp.int32(0), jnp.int32(0)))
        def totals(info, carry):
            steps_before, pieces_before = carry
            piece = product.piece(info.index[0], first_table_gmem, second_table_gmem)
            accumulator = lax.rem(pieces_before, jnp.int32(_ACCUMULATORS))
            wgrad = product.kind == "wgrad"

            @pl.when((warpgroup == 0) & (piece.steps > 0))
            def _():
                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == 0)
                    def _():
                        _load(product, piece, steps_before, a_gmem, b_gmem if wgrad else b_gmem.at[piece.expert], scratch)

                    @pl.when(warp == 1)
                    def _():
                        @pl.when(pieces_before >= _ACCUMULATORS)
                        def _():
                            plgpu.barrier_wait(scratch.free.at[accumulator])

                        _multiply(product, piece, steps_before, accumulator, scratch)

            @pl.when(warpgroup == 1)
            def _():
                _store(product, piece, accumulator, out_gmem.at[piece.expert] if wgrad else out_gmem, scratch)

            return steps_before + piece.steps, pieces_before + (piece.steps > 0).astype(jnp.int32)

        _finish(product, warpgroup, *totals, scratch)

    return plgpu.kernel(
        body,
        out_type=product.out,
        scratch_types=_scratch_types(product, a.dtype),
        grid=(num_cores,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"grouped_{product.kind}_sm100",
    )(*tables, a, b)


def _load(product: Product, piece: Piece, steps_before, a_gmem, b_gmem, scratch: _Scratch) -> None:
    """The TMA warp's part of a piece."""

    def step(s, _):
        slot = lax.rem(steps_before + s, jnp.int32(product.tile.stages))

        @pl.when(steps_before + s >= product.tile.stages)
        def _():
            plgpu.barrier_wait(scratch.empty.at[slot])

        for gmem, smem, block, index in (
            (a_gmem, scratch.a_smem, product.a_block, product.a_index(piece, s)),
            (b_gmem, scratch.b_smem, product.b_block, product.b_index(piece, s)),
        ):
            place = tuple(pl.ds(i * size, size) for i, size in zip(index, block, strict=True))
            plgpu.copy_gmem_to_smem(gmem.at[place], smem.at[slot], scratch.full.at[slot])

    lax.fori_loop(0, piece.steps, step, None)


def _multiply(product: Product, piece: Piece, steps_before, accumulator, scratch: _Scratch) -> None:
    """The MMA warp's part of a piece."""
    acc = _accumulator(product, accumulator, scratch)

    def step(s, _):
        slot = lax.rem(steps_before + s, jnp.int32(product.tile.stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        a, b = scratch.a_smem.at[slot], scratch.b_smem.at[slot]
        plgpu.tcgen05_mma(
            acc,
            a.transpose((1, 0)) if product.kind == "wgrad" else a,
            b.transpose((1, 0)) if product.kind == "dgrad" else b,
            scratch.empty.at[slot],
            accumulate=s > 0,
        )

        @pl.when(s == piece.steps - 1)
        def _():
            plgpu.tcgen05_commit_arrive(scratch.done.at[accumulator])

    lax.fori_loop(0, piece.steps, step, None)


def _store(product: Product, piece: Piece, accumulator, out_gmem, scratch: _Scratch) -> None:
    """The second warpgroup's part of a piece, in column strips through two buffers."""
    tile, dtype = product.tile, product.out.dtype
    acc = _accumulator(product, accumulator, scratch)

    @pl.when(piece.steps > 0)
    def _():
        plgpu.barrier_wait(scratch.done.at[accumulator])

    width = _store_columns(product)
    for strip in range(tile.cols // width):
        strip_smem = scratch.out_smem.at[strip % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(piece.steps > 0)
        def _(strip_smem=strip_smem, strip=strip):
            strip_smem[...] = plgpu.async_load_tmem(acc.at[:, pl.ds(strip * width, width)]).astype(dtype)

        @pl.when(piece.steps == 0)
        def _(strip_smem=strip_smem):
            strip_smem[...] = plgpu.layout_cast(jnp.zeros((tile.rows, width), dtype), plgpu.Layout.TCGEN05)

        plgpu.commit_smem()
        place = pl.ds(piece.row * tile.rows, tile.rows), pl.ds(piece.col * tile.cols + strip * width, width)
        plgpu.copy_smem_to_gmem(strip_smem, out_gmem.at[place])

    @pl.when(piece.steps > 0)
    def _():
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(scratch.free.at[accumulator])


def _finish(product: Product, warpgroup, steps, pieces, scratch: _Scratch) -> None:
    """See everything through that is still under way, so that no barrier is signalled after the block has left the SM."""

    @pl.when(warpgroup == 0)
    def _():
        @plgpu.warp_map
        def _(warp):
            for warp_of_barrier, barrier, count, slots in (
                (0, scratch.empty, steps, product.tile.stages),
                (1, scratch.free, pieces, _ACCUMULATORS),
            ):
                for i in range(slots):

                    @pl.when((warp == warp_of_barrier) & (count > i))
                    def _(barrier=barrier, last=count - 1 - i, slots=slots):
                        plgpu.barrier_wait(barrier.at[lax.rem(last, jnp.int32(slots))])

    @pl.when(warpgroup == 1)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _accumulator(product: Product, accumulator, scratch: _Scratch):
    return scratch.acc_tmem.at[:, pl.ds(accumulator * product.tile.cols, product.tile.cols)]


def _scratch_types(product: Product, dtype) -> _Scratch:
    tile = product.tile
    strip = (2, tile.rows, _store_columns(product))
    return _Scratch(
        a_smem=_block_type((tile.stages, *product.a_block), dtype),
        b_smem=_block_type((tile.stages, *product.b_block), dtype),
        out_smem=_block_type(strip, product.out.dtype),
        acc_tmem=plgpu.TMEM((tile.rows, tile.cols * _ACCUMULATORS), jnp.float32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=tile.stages, orders_tensor_core=True),
        done=plgpu.Barrier(num_arrivals=1, num_barriers=_ACCUMULATORS, orders_tensor_core=True),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=_ACCUMULATORS, orders_tensor_core=True),
    )


def _store_columns(product: Product) -> int:
    return _STORE_BYTES // product.out.dtype.itemsize


def _block_type(shape: tuple[int, ...], dtype):
    """Blocks in shared memory as tiles of 8 x 128 bytes, swizzled, as the tensor cores and TMA read them."""
    columns = _STORE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_STORE_BYTES)))
