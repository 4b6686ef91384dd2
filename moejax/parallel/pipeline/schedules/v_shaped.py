"""Two stages on a rank, down the ranks and back up, so that every rank holds equally much (Qi et al. 2024, arXiv:2405.15362).

    stage    0  1  2  3         stage s is on rank s, or on rank 2P - 1 - s: the first and the last rank hold an early stage, whose
             7  6  5  4         activations wait long, and a late one, whose activations wait hardly

A microbatch enters every second tick. Stages of a rank differ by an odd number, so its passes never meet, and it waits as long as 1f1b.
"""

from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.schedules.kind import Kind


def make(ranks: int, microbatches: int, virtual_stages: int) -> Order:
    last = 2 * ranks - 1
    forward = {(s, m): 2 * m + s for s in range(last + 1) for m in range(microbatches)}
    backward = {(s, m): 2 * m + last + (last - s) for s in range(last + 1) for m in range(microbatches)}
    return Order(tuple(min(s, last - s) for s in range(last + 1)), forward, backward)


V_SHAPED = Kind("v_shaped", make, lambda ranks, microbatches, virtual_stages: None, least_stages=2, most_stages=2)
