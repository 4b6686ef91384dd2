"""Forward and backward passes in turn, never both in a tick: a rank p holds P - p microbatches, the least that keeps all ranks busy.

1F1B as a rank runs it that keeps no step with others (Narayanan et al. 2019, PipeDream). In lock step every second tick is lost.
"""

from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.schedules.kind import Kind


def make(ranks: int, microbatches: int, virtual_stages: int) -> Order:
    forward = {(s, m): s + 2 * m for s in range(ranks) for m in range(microbatches)}
    backward = {(s, m): 2 * ranks - 1 - s + 2 * m for s in range(ranks) for m in range(microbatches)}
    return Order(tuple(range(ranks)), forward, backward)


ALTERNATING = Kind("alternating", make, lambda ranks, microbatches, virtual_stages: None)
