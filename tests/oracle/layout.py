"""Which rank and microbatch each row of a global batch belongs to."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layout:
    """A step's split: microbatch m holds rows [m G/M, (m+1) G/M), and rank r = dp_index * ep + ep_index the r-th slice of each."""

    dp: int = 1
    ep: int = 1
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.ep

    def rows(self, batch_size: int, microbatch: int, rank: int) -> np.ndarray:
        """Rows of the global batch on one rank in one microbatch."""
        size = batch_size // self.microbatches // self.ranks
        start = (microbatch * self.ranks + rank) * size
        return np.arange(start, start + size)

    def expert_groups(self, batch_size: int) -> list[list[np.ndarray]]:
        """For each microbatch and dp index, the rows of each of its ep ranks: those that share one set of experts."""
        return [
            [self.rows(batch_size, m, d * self.ep + e) for e in range(self.ep)] for m in range(self.microbatches) for d in range(self.dp)
        ]

    def groups(self, batch_size: int, kind: str) -> list[np.ndarray]:
        """Row sets over which a balance loss of that kind takes its statistics."""
        everywhere = [(m, r) for m in range(self.microbatches) for r in range(self.ranks)]
        if kind == "instance":
            return [np.array([row]) for row in range(batch_size)]
        if kind == "local":
            return [self.rows(batch_size, m, r) for m, r in everywhere]
        assert kind == "global", kind
        return list(np.arange(batch_size).reshape(self.microbatches, -1))
