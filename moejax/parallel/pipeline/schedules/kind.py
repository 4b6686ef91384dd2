"""What a schedule file offers."""

from collections.abc import Callable
from dataclasses import dataclass

from moejax.parallel.pipeline.schedule import Maker


@dataclass(frozen=True)
class Kind:
    """A schedule by its name.

    make: (ranks, microbatches, virtual stages of a rank) -> order. It has to be right for every number that `refusal` lets through.
    refusal: virtual stages of a rank -> why there is no such schedule, and after a semicolon what to do; None if there is.
    theory: (ranks, microbatches, virtual stages) -> share of the time in which ranks wait by the formula of the paper, where a pass forward
        takes one unit and a pass backward two, and ranks do not keep step. None where there is no formula.
    """

    name: str
    make: Maker
    refusal: Callable[[int], str | None]
    theory: Callable[[int, int, int], float | None]


def only_one_virtual_stage(virtual_stages: int) -> str | None:
    return None if virtual_stages == 1 else "has one stage on each rank; use virtual_stages=1, or interleaved"
