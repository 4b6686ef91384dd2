"""What the Mosaic kernels of every GPU generation share: the tile, the three products cut into pieces, and what they cannot take.

    kind       A block of step s     B block of step s          piece of the result
    forward    x[row, s]             w[expert][s, col]          y[row, col]
    dgrad      dy[row, s]            w[expert][col, s].T        dx[row, col]
    wgrad      x[first + s, row].T   dy[first + s, col]         dw[expert][row, col]

A piece is the sum of A block @ B block over its steps; one without steps is zero. Weights, x and dy are read as they lie in
memory: the tensor cores take either operand transposed, so nothing is copied to be transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Kind = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True)
class TileConfig:
    """rows x cols: a piece of the result. depth: a step of the sum. stages: steps whose operands are in flight."""

    rows: int = 128
    cols: int = 128
    depth: int = 64
    stages: int = 4


class Piece(NamedTuple):
    """One tile of the result: its place, its expert, the first block of wgrad's rows, and the number of steps; int32 scalars."""

    row: Any
    col: Any
    expert: Any
    first: Any
    steps: Any


@dataclass(frozen=True)
class Product:
    """One grouped product, seen as a list of `row_tiles * col_tiles` pieces, for wgrad times `experts`."""

    kind: Kind
    out: jax.ShapeDtypeStruct
    experts: int
    contracted: int
    """Size of the dim that is summed over; for wgrad the rows of the buffer."""
    tile: TileConfig

    @property
    def row_tiles(self) -> int:
        return _tiles(self.out.shape[-2], self.tile.rows)

    @property
    def col_tiles(self) -> int:
        return _tiles(self.out.shape[-1], self.tile.cols)

    @property
    def num_pieces(self) -> int:
        return self.row_tiles * self.col_tiles * (self.experts if self.kind == "wgrad" else 1)

    def piece(self, index, first_table, second_table) -> Piece:
        """Piece `index`, in an order in which neighbours share operands: columns fastest, then rows, then experts.

        The tables are the arrays of `tables`.
        """
        rest, col = lax.div(index, jnp.int32(self.col_tiles)), lax.rem(index, jnp.int32(self.col_tiles))
        if self.kind == "wgrad":
            expert, row = lax.div(rest, jnp.int32(self.row_tiles)), lax.rem(rest, jnp.int32(self.row_tiles))
            depth = jnp.int32(self.tile.depth)
            return Piece(row, col, expert, lax.div(first_table[expert], depth), lax.div(second_table[expert], depth))
        steps = jnp.where(rest < second_table[0], jnp.int32(_tiles(self.contracted, self.tile.depth)), jnp.int32(0))
        return Piece(rest, col, first_table[rest], jnp.int32(0), steps)

    @property
    def a_block(self) -> tuple[int, int]:
        return (self.tile.depth, self.tile.rows) if self.kind == "wgrad" else (self.tile.rows, self.tile.depth)

    @property
    def b_block(self) -> tuple[int, int]:
        return (self.tile.cols, self.tile.depth) if self.kind == "dgrad" else (self.tile.depth, self.tile.cols)

    def a_index(self, piece: Piece, step) -> tuple:
        """Block coordinates of A in its array."""
        return (piece.first + step, piece.row) if self.kind == "wgrad" else (piece.row, step)

    def b_index(self, piece: Piece, step) -> tuple:
        """Block coordinates of B in its array, for forward and dgrad in the matrix of the piece's expert."""
        return (piece.col, step) if self.kind == "dgrad" else (piece.first + step, piece.col)


def refusal(dtype: Any, widths: Sequence[int], tile: int) -> str | None:
    """What keeps the Mosaic kernels from a product of these widths (K and N), and the way out; None if nothing does."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"multiply bfloat16, not {jnp.dtype(dtype)}; use dtype bfloat16, or 'reference', which is slow"
    if any(width % TileConfig.depth for width in widths):
        sizes = " and ".join(str(width) for width in widths)
        return f"need widths that are multiples of {TileConfig.depth}, not {sizes}; change them, or use 'reference', which is slow"
    if tile != TileConfig.rows:
        return f"need tile={TileConfig.rows}, not {tile}; take the tile from choose_tile"
    return None


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)
