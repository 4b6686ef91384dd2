"""What a schedule file offers."""

from collections.abc import Callable
from dataclasses import dataclass

from moejax.parallel.pipeline.schedule import Maker


@dataclass(frozen=True)
class Kind:
    """A schedule by its name.

    make: (ranks, microbatches, virtual stages of a rank) -> order. It has to be right for every number of stages between the two limits.
    theory: (ranks, microbatches, virtual stages) -> share of the time in which ranks wait by the formula of the paper, where a pass forward
        takes one unit and a pass backward two, and ranks do not keep step. None where there is no formula.
    least_stages, most_stages: how many virtual stages a rank can have; None is no limit.
    """

    name: str
    make: Maker
    theory: Callable[[int, int, int], float | None]
    least_stages: int = 1
    most_stages: int | None = 1

    def takes(self, virtual_stages: int) -> bool:
        """Whether there is such a schedule with that many stages on a rank."""
        return self.least_stages <= virtual_stages and (self.most_stages is None or virtual_stages <= self.most_stages)
