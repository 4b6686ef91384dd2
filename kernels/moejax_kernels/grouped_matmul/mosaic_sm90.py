"""Hopper: TMA copies in, wgmma, TMA copies out. One warpgroup of each SM walks over every num_cores-th piece of the result.

    piece          copies of A and B blocks (TMA, `stages` ahead)   wgmma 128 x 128 x 64 into registers   ->  smem  ->  TMA store
    without steps                                                   zeros                                 ->  smem  ->  TMA store

The copies of a piece do not overlap the store of the piece before it: simple first.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax_kernels.grouped_matmul.shapes import Product, TileConfig

TILE = TileConfig(rows=128, cols=128, depth=64, stages=4)  # 128 KiB of shared memory


def grouped_product(product: Product, tables: tuple[jax.Array, jax.Array], a: jax.Array, b: jax.Array, *, num_cores: int) -> jax.Array:
    """The product of `shapes.py` with tables int32 as made in `mosaic.py`; accumulates in float32."""
    tile, out = product.tile, product.out

    def body(first_table_gmem, second_table_gmem, a_gmem, b_gmem, out_gmem):
        @plgpu.nd_loop((product.num_pieces,), collective_axes="sm")
        def _piece(info):
            piece = product.piece(info.index[0], first_table_gmem, second_table_gmem)
            wgrad = product.kind == "wgrad"
            b_of_expert = b_gmem if wgrad else b_gmem.at[piece.expert]
            out_of_expert = out_gmem.at[piece.expert] if wgrad else out_gmem

            def sum_steps(acc):
                def step(_, a_smem, b_smem):
                    plgpu.wgmma(
                        acc,
                        a_smem.transpose((1, 0)) if product.kind == "wgrad" else a_smem,
                        b_smem.transpose((1, 0)) if product.kind == "dgrad" else b_smem,
                    )

                @pl.when(piece.steps > 0)
                def _():
                    plgpu.emit_pipeline(
                        step,
                        grid=(piece.steps,),
                        in_specs=[
                            # wgmma reads shared memory after it returns: a block is free one step later.
                            _block_spec(product.a_block, a.dtype, lambda s: product.a_index(piece, s)),
                            _block_spec(product.b_block, b.dtype, lambda s: product.b_index(piece, s)),
                        ],
                        max_concurrent_steps=tile.stages,
                    )(a_gmem, b_of_expert)

                return acc[...]

            result = pl.run_scoped(sum_steps, plgpu.ACC((tile.rows, tile.cols)))  # starts at zero

            def store(out_smem):
                out_smem[...] = result.astype(out.dtype)
                plgpu.commit_smem()
                place = pl.ds(piece.row * tile.rows, tile.rows), pl.ds(piece.col * tile.cols, tile.cols)
                plgpu.copy_smem_to_gmem(out_smem, out_of_expert.at[place])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(store, plgpu.SMEM((tile.rows, tile.cols), out.dtype, transforms=_transforms(tile.cols, out.dtype)))

    return plgpu.kernel(
        body,
        out_type=out,
        grid=(num_cores,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"grouped_{product.kind}_sm90",
    )(*tables, a, b)


def _block_spec(block: tuple[int, int], dtype, index):
    return plgpu.BlockSpec(block, index, delay_release=1, transforms=_transforms(block[1], dtype))


def _transforms(minor: int, dtype):
    """Layout of a block in shared memory: rows of 8 x 128 bytes, swizzled, as the tensor cores and TMA read it."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor * itemsize * 8)
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
