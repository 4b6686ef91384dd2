"""One forward and one backward pass in turn, with one stage on a rank (1f1b) or several (interleaved).

PipeDream-Flush and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473). In lock step a tick holds both passes: no time is lost,
and the warm-up of rank p is 2 (P - 1 - p) + (V - 1) P forward passes.
"""

from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.schedules.kind import Kind


def make(ranks: int, microbatches: int, virtual_stages: int) -> Order:
    """Microbatches enter in groups of P; a group runs through a rank's stages one after the other."""
    last = ranks * virtual_stages - 1
    forward, backward = {}, {}
    for microbatch in range(microbatches):
        group, inside = divmod(microbatch, ranks)
        start = group * ranks * virtual_stages + inside
        for stage in range(last + 1):
            rank, chunk = stage % ranks, stage // ranks
            forward[stage, microbatch] = start + stage
            backward[stage, microbatch] = start + last + (virtual_stages - 1 - chunk) * ranks + (ranks - 1 - rank)
    return Order(tuple(stage % ranks for stage in range(last + 1)), forward, backward)


def theory(ranks: int, microbatches: int, virtual_stages: int) -> float | None:
    """Narayanan et al. 2021, section 2.2: (P - 1) / (V M + P - 1), where M is a multiple of P or V is 1."""
    if virtual_stages > 1 and microbatches % ranks:
        return None
    return (ranks - 1) / (virtual_stages * microbatches + ranks - 1)


ONE_F_ONE_B = Kind("1f1b", make, theory)
INTERLEAVED = Kind("interleaved", make, theory, least_stages=2, most_stages=None)
