"""The rules that every pipeline schedule keeps."""

import itertools
from collections.abc import Iterator

from moejax.parallel.pipeline.schedule import Order, Ticks


def violations(order: Order, ranks: int, microbatches: int) -> Iterator[str]:
    """What is wrong with an order, one sentence for each fault; nothing if it can be run.

    Every stage and microbatch runs forward and backward once. A stage waits for the one before it (forward) and after it (backward): what
    is made in a tick arrives in the next. The last stage may turn around within a tick. A rank runs at most one pass of each kind in a
    tick. Stages that follow each other lie on the same rank or on neighbours, in a ring. The first is on rank 0, and takes microbatches in
    order.
    """
    stages = len(order.place)
    wanted = {(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)}
    kinds = {"forward": order.forward, "backward": order.backward} | ({} if order.weight is None else {"weight": order.weight})
    for kind, ticks in kinds.items():
        if ticks.keys() != wanted:
            other = sorted(ticks.keys() ^ wanted)[:3]
            yield f"{kind} passes are not one for each of {stages} stages and {microbatches} microbatches: {other}"
            return
        if min(ticks.values()) < 0:
            yield f"a {kind} pass has a negative tick"
    yield from _places(order, ranks)
    yield from _waits(order, stages)
    for kind, ticks in kinds.items():
        yield from _clashes(order, kind, ticks)


def _places(order: Order, ranks: int) -> Iterator[str]:
    stages = len(order.place)
    if order.place[0] != 0:
        yield f"stage 0 is on rank {order.place[0]}; it has to be on rank 0"
    for rank in range(ranks):
        if (count := order.place.count(rank)) * ranks != stages:
            yield f"rank {rank} has {count} of {stages} stages; every one of {ranks} ranks has the same number"
    for stage, (rank, following) in enumerate(zip(order.place, order.place[1:], strict=False)):
        if (following - rank) % ranks not in (0, 1, ranks - 1):
            yield f"stage {stage} on rank {rank} is followed by a stage on rank {following}, which is no neighbour"


def _waits(order: Order, stages: int) -> Iterator[str]:
    forward, backward = order.forward, order.backward
    for kind, ticks in (("forward", forward), ("backward", backward)):
        first = [ticks[0, m] for m in range(sum(stage == 0 for stage, _ in ticks))]
        if any(after <= before for before, after in itertools.pairwise(first)):
            yield f"stage 0 does not run microbatches {kind} in order: they run in ticks {first}"
    for (stage, microbatch), tick in forward.items():
        if stage > 0 and tick <= forward[stage - 1, microbatch]:
            yield f"stage {stage} runs microbatch {microbatch} in tick {tick}, before stage {stage - 1} has handed it on"
    for (stage, microbatch), tick in backward.items():
        if tick < forward[stage, microbatch]:
            yield f"stage {stage} runs microbatch {microbatch} backward in tick {tick}, before its forward pass"
        if stage < stages - 1 and tick <= backward[stage + 1, microbatch]:
            yield f"stage {stage} runs microbatch {microbatch} backward in tick {tick}, before stage {stage + 1} has handed it back"
    for (stage, microbatch), tick in (order.weight or {}).items():
        if tick < backward[stage, microbatch]:
            yield f"stage {stage} makes the gradients of weights of microbatch {microbatch} in tick {tick}, before its backward pass"


def _clashes(order: Order, kind: str, ticks: Ticks) -> Iterator[str]:
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for place, tick in ticks.items():
        rank = order.place[place[0]]
        if (other := seen.setdefault((rank, tick), place)) != place:
            yield f"rank {rank} runs two {kind} passes in tick {tick}: of stage and microbatch {other} and {place}"
