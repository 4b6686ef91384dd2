"""All forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965). Holds every microbatch at once."""

from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.schedules.kind import Kind


def make(ranks: int, microbatches: int, virtual_stages: int) -> Order:
    turn = microbatches + ranks - 1  # the tick in which the last stage starts backward
    forward = {(s, m): m + s for s in range(ranks) for m in range(microbatches)}
    backward = {(s, m): turn + m + (ranks - 1 - s) for s in range(ranks) for m in range(microbatches)}
    return Order(tuple(range(ranks)), forward, backward)


def theory(ranks: int, microbatches: int, virtual_stages: int) -> float:
    """Huang et al. 2019, section 2.3: (P - 1) / (M + P - 1)."""
    return (ranks - 1) / (microbatches + ranks - 1)


GPIPE = Kind("gpipe", make, theory)
