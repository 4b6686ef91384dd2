"""(Interleaved) 1F1B whose gradients of weights wait for ticks in which every rank has some (ZB-H1: Qi et al. 2023, arXiv:2401.10241).

The backward pass of activations, B, is on the way to the next stage; that of weights, W, is not. In lock step a tick costs a W if any rank
runs one, so all ranks run the W of a stage and microbatch in one tick: the one in which the first of them is done with its B.
"""

from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.schedules import one_f_one_b
from moejax.parallel.pipeline.schedules.kind import Kind


def make(ranks: int, microbatches: int, virtual_stages: int) -> Order:
    order = one_f_one_b.make(ranks, microbatches, virtual_stages)
    weight = {(stage, m): order.backward[stage - stage % ranks, m] for stage, m in order.backward}
    return order._replace(weight=weight)


def theory(ranks: int, microbatches: int, virtual_stages: int) -> float | None:
    """Qi et al. 2023, table 2, ZB-H1 where F, B and W take one unit each: (P - 1) / (3 M + P - 1)."""
    return None if virtual_stages > 1 else (ranks - 1) / (3 * microbatches + ranks - 1)


ZERO_BUBBLE = Kind("zero_bubble", make, theory, most_stages=None)
