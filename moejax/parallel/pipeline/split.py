"""Which MoE blocks each stage holds, and in which order their arrays lie on the devices.

    9 blocks, 2 ranks, interleaved, 2 stages on each     stage 0: 0 1 2   stage 1: 3 4   stage 2: 5 6   stage 3: 7 8
    arrays over mesh axis pp                             rank 0: 0 1 2 5 6 -     rank 1: 3 4 - 7 8 -

All stages have room for equally many blocks, so that ranks run one program; the first ones hold one more where they do not divide.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True, eq=False)
class Split:
    """blocks: number of the MoE block in each place, -1 in places that are empty."""

    blocks: Int[np.ndarray, "ranks stages_of_a_rank blocks_of_a_stage"]

    @property
    def order(self) -> Int[np.ndarray, " places"]:
        """Block of each place of the arrays, -1 where there is none."""
        return self.blocks.reshape(-1)

    @property
    def is_natural(self) -> bool:
        """Whether arrays hold the blocks in their own order, without gaps."""
        return bool((self.order == np.arange(self.order.size)).all())

    @property
    def is_padded(self) -> bool:
        return bool((self.order < 0).any())

    @property
    def places(self) -> Int[np.ndarray, " num_blocks"]:
        """Place of each block."""
        return np.argsort(self.order, kind="stable")[(self.order < 0).sum() :].astype(np.int32)


def split_blocks(num_blocks: int, place: tuple[int, ...], ranks: int) -> Split:
    """Blocks split over stages as evenly as can be; stage s is on rank place[s].

    Raises:
        ValueError: if there are more stages than blocks; a config says so first.
    """
    stages = len(place)
    if num_blocks < stages:
        raise ValueError(f"{num_blocks} blocks cannot be split over {stages} stages")
    size, longer = divmod(num_blocks, stages)
    room = size + (longer > 0)
    blocks = np.full((ranks, stages // ranks, room), -1, np.int32)
    chunk, first = [0] * ranks, 0
    for stage, rank in enumerate(place):
        count = size + (stage < longer)
        blocks[rank, chunk[rank], :count] = np.arange(first, first + count)
        first += count
        chunk[rank] += 1
    return Split(blocks)
