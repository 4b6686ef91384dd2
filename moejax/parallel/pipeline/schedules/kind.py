"""What a schedule file offers."""

from collections.abc import Callable
from dataclasses import dataclass

from moejax.parallel.pipeline.schedule import Order


@dataclass(frozen=True)
class Kind:
    """A schedule by its name.

    make: (ranks, microbatches, virtual stages of a rank) -> order. It has to be right for every number that `refusal` lets through.
    refusal: (ranks, virtual stages) -> why there is no such schedule, and after a semicolon what to do; None if there is.
    theory: (ranks, microbatches, virtual stages) -> share of the time in which ranks wait by the formula of the paper, where a pass forward
        takes one unit and a pass backward two, and ranks do not keep step. None where there is no formula.
    """

    name: str
    make: Callable[[int, int, int], Order]
    refusal: Callable[[int, int], str | None]
    theory: Callable[[int, int, int], float | None]


def only_one_virtual_stage(ranks: int, virtual_stages: int) -> str | None:
    return None if virtual_stages == 1 else "has one stage on each rank; use virtual_stages=1, or interleaved"
