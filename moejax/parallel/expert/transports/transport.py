"""What a transport is: the two moves of a MoE layer, and where they run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _no_objection(platform: str, ranks: int) -> None:
    return None


@dataclass(frozen=True)
class Transport:
    """Functions that carry rows to the experts and back, inside shard_map. All transports give equal rows, drops and gradients.

    name: as in model.moe.transport.
    prepare: (plan, axis) -> moves. What the transport wants to know of the plan, worked out once for both moves and their gradients.
    dispatch: (x [T, D], plan, moves, axis) -> buffer [rows, D]. Each token in the row of each of its kept routes; other rows are zero.
    combine: (y [rows, D], weights [T, A], plan, moves, axis) -> [T, D]. Each token's sum of its kept routes' rows by weight, in float32.
        Both are differentiable, in x, y and weights.
    refusal: (platform, ranks) -> why it cannot run there; and what to do, after a semicolon. None if it can.
    warning: (platform, ranks) -> a known fault that may show there; and what to do, after a semicolon. None without one.
    """

    name: str
    prepare: Callable[..., Any]
    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    refusal: Callable[[str, int], str | None] = _no_objection
    warning: Callable[[str, int], str | None] = _no_objection
