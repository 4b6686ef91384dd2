"""Where every routed row goes, worked out on the device from one all-gather of expert counts.

Sizes are local to a rank unless said: T tokens, A experts per token, R = T * A routes, X local experts, ep ranks.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moejax_kernels.grouped_matmul import aligned_starts, buffer_rows

_USUAL_CAPACITY = 1.25


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """The moves of one dispatch and its combine; int32, on the device, but for the two sizes.

    A rank's routes are sorted by expert. Chunk (peer, x) is the run of routes for local expert x of that peer. What a rank keeps of
    the routes for one peer is a prefix of them, because a peer fills its rows in the same order.

    order, place: [R], sorted place -> route, and route -> sorted place.
    expert: [R], expert of each sorted place (its chunk), clipped for routes of padding tokens.
    kept: bool [R], by route; False for dropped routes and for padding tokens.
    send_offset, send_size, send_start: [ep * X], my chunk (peer, x): first sorted place, rows kept, first row in the peer's buffer.
    receive_start, receive_size, receive_origin: [ep * X], peer's chunk for my x: first row here, rows, first sorted place there.
    group_sizes: [X], real rows of my experts.
    wanted: [], rows that all ranks would send me without a capacity.
    rows: size of the receive buffer. Any split of the capacity over the local experts fits, tile-aligned.
    pair_rows: most rows that one rank can send another, whatever the routing.
    """

    order: Array
    place: Array
    expert: Array
    kept: Array
    send_offset: Array
    send_size: Array
    send_start: Array
    receive_start: Array
    receive_size: Array
    receive_origin: Array
    group_sizes: Array
    wanted: Array
    rows: int = field(metadata={"static": True})
    pair_rows: int = field(metadata={"static": True})


def capacity(capacity_factor: float, tokens: int, top_k: int) -> int:
    """Rows a rank accepts: max(1, ceil(capacity_factor * T * A)), the factor taken as the decimal that was typed."""
    return max(1, math.ceil(Fraction(str(capacity_factor)) * tokens * top_k))


class Portion(NamedTuple):
    """How a rank's tokens go through a layer: in `chunks` of `tokens` each, a receive buffer holding `accepted` real rows."""

    chunks: int
    tokens: int
    accepted: int


def portion(*, tokens: int, top_k: int, num_experts: int, ranks: int, capacity_factor: float | None) -> Portion:
    """One chunk with the capacity; without one, chunks small enough that the worst case fits the buffer of a usual capacity."""

    def worst(tokens):
        return ranks * tokens * min(top_k, num_experts // ranks)

    if capacity_factor is not None:
        return Portion(1, tokens, min(capacity(capacity_factor, tokens, top_k), worst(tokens)))
    chunks = min(tokens, math.ceil(worst(tokens) / (_USUAL_CAPACITY * tokens * top_k)))
    size = -(-tokens // chunks)
    return Portion(chunks, size, worst(size))


def receive_rows(*, tokens: int, top_k: int, num_experts: int, ranks: int, capacity_factor: float | None, tile: int) -> int:
    """Rows of the buffer that a rank receives routed rows in; T * A * capacity_factor, and room for each local expert's last tile."""
    part = portion(tokens=tokens, top_k=top_k, num_experts=num_experts, ranks=ranks, capacity_factor=capacity_factor)
    return buffer_rows(part.accepted, num_experts // ranks, tile)


def count_ranks(axis: str | None) -> int:
    """Ranks that split the experts; without an axis, one."""
    return 1 if axis is None else lax.axis_size(axis)


def make_plan(experts: Int[Array, "T A"], *, num_experts: int, capacity: int, tile: int, axis: str | None) -> Plan:
    """Plan the moves of one microbatch. Expert id num_experts marks a route that goes nowhere (padding).

    Rows of a receiver are ordered by local expert, then source rank, then route. The first `capacity` of them are kept (tail drop,
    the same on all ranks and for any tile); then each expert's rows start at a multiple of the tile.
    """
    ranks = count_ranks(axis)
    me = 0 if ranks == 1 else lax.axis_index(axis)
    local = num_experts // ranks
    flat = experts.reshape(-1)
    route = jnp.arange(flat.size, dtype=jnp.int32)
    by_expert, order = lax.sort_key_val(flat, route)  # stable
    place = jnp.zeros_like(order).at[order].set(route, unique_indices=True)
    mine = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")
    counts = mine if ranks == 1 else lax.all_gather(mine, axis)
    counts = counts.reshape(ranks, ranks, local)  # [source, destination, x]

    # Tail drop, per destination over its rows in (x, source) order.
    wanted = counts.transpose(1, 2, 0).reshape(ranks, local * ranks)
    kept = jnp.clip(capacity - _before(wanted, axis=1), 0, wanted).reshape(ranks, local, ranks)

    # First row of (destination, x, source) in the destination's buffer.
    starts = jax.vmap(lambda sizes: aligned_starts(sizes, tile))(kept.sum(axis=2))
    start = starts[:, :, None] + _before(kept, axis=2)
    offset = _before(counts.reshape(ranks, -1), axis=1).reshape(ranks, ranks, local)  # first sorted place on the source

    expert = jnp.minimum(by_expert, num_experts - 1)
    send_size = kept[:, :, me].reshape(-1)
    send_offset = offset[me].reshape(-1)
    is_kept = (route - send_offset[expert] < send_size[expert]) & (by_expert < num_experts)
    return Plan(
        order=order,
        place=place,
        expert=expert,
        kept=is_kept[place],
        send_offset=send_offset,
        send_size=send_size,
        send_start=start[:, :, me].reshape(-1),
        receive_start=start[me].T.reshape(-1),
        receive_size=kept[me].T.reshape(-1),
        receive_origin=offset[:, me].reshape(-1),
        group_sizes=kept[me].sum(axis=1),
        wanted=wanted[me].sum(),
        rows=buffer_rows(capacity, local, tile),
        pair_rows=min(capacity, experts.shape[0] * min(experts.shape[1], local)),
    )


def rows_of_routes(plan: Plan) -> Int[Array, " R"]:
    """For each of my routes its row, counted over the buffers of all ranks in rank order; past their end for routes without one."""
    local = plan.group_sizes.shape[0]
    ranks = plan.send_size.shape[0] // local
    expert = plan.expert[plan.place]
    row = (expert // local) * plan.rows + plan.send_start[expert] + plan.place - plan.send_offset[expert]
    return jnp.where(plan.kept, row, ranks * plan.rows)


def row_sources(plan: Plan) -> tuple[Int[Array, " rows"], Int[Array, " rows"], Bool[Array, " rows"]]:
    """For each row of my buffer: the rank that fills it, the sorted place there, and whether it is a real row at all."""
    local = plan.group_sizes.shape[0]
    ranks = plan.send_size.shape[0] // local
    # Chunks in (x, source) order start at rising rows; an empty chunk starts where the next one does.
    by_expert = [a.reshape(ranks, local).T.reshape(-1) for a in (plan.receive_start, plan.receive_size, plan.receive_origin)]
    start, size, origin = by_expert
    row = jnp.arange(plan.rows, dtype=jnp.int32)
    chunk = jnp.maximum(jnp.searchsorted(start, row, side="right", method="compare_all") - 1, 0)
    inside = row - start[chunk]
    return chunk % ranks, origin[chunk] + inside, (inside >= 0) & (inside < size[chunk])


def _before(x: jax.Array, axis: int) -> jax.Array:
    """Sum of the entries before each one."""
    return jnp.cumsum(x, axis) - x
