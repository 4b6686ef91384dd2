"""The routed part of a MoE layer over the `ep` axis: plan, dispatch, experts, combine; with a capacity or dropless."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from moejax.ops.routing import ROUTING
from moejax.parallel.expert.plan import capacity, count_ranks, make_plan, portion
from moejax.parallel.expert.transports import Transport

ExpertFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows [rows, D] in the tile-aligned layout, group_sizes int32 [X]) -> rows [rows, D]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Traffic:
    """What one rank saw in one layer and microbatch, float32 scalars.

    routes: routes of its real tokens. dropped: those that found no place.
    demand: rows that wanted its buffer, as a share of the capacity; above 1 some were dropped. 0 if dropless.
    """

    routes: Array
    dropped: Array
    demand: Array


def expert_parallel(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    valid: Bool[Array, " T"],
    expert_fn: ExpertFn,
    *,
    num_experts: int,
    capacity_factor: float | None,
    tile: int,
    transport: Transport,
    axis: str | None = "ep",
) -> tuple[Float[Array, "T D"], Traffic]:
    """Send each valid token to its experts and add up what they return, weighted in float32. Sizes are local to the rank.

    Args:
        expert_fn: the local experts, applied to rows sorted by expert.
        capacity_factor: None never drops: tokens go through in chunks whose worst case fits the buffer.
        axis: mesh axis that splits the experts; None if all are here.
    """
    tokens, top_k = experts.shape
    experts = jnp.where(valid[:, None], experts, num_experts)
    ranks = count_ranks(axis)

    def run(x, experts, weights, limit):
        with jax.named_scope("plan"):
            plan = make_plan(experts, num_experts=num_experts, capacity=limit, tile=tile, axis=axis)
            plan, moves = jax.tree.map(lambda a: checkpoint_name(a, ROUTING), (plan, transport.prepare(plan, axis)))
        with jax.named_scope("dispatch"):
            rows = checkpoint_name(transport.dispatch(x, plan, moves, axis), "expert_rows")
        with jax.named_scope("experts"):
            rows = expert_fn(rows, plan.group_sizes)
        with jax.named_scope("combine"):
            return transport.combine(rows, weights, plan, moves, axis), plan

    routes = valid.sum(dtype=jnp.float32) * top_k
    chunks, size, accepted = portion(tokens=tokens, top_k=top_k, num_experts=num_experts, ranks=ranks, capacity_factor=capacity_factor)
    if capacity_factor is not None:
        y, plan = run(x, experts, weights, accepted)
        dropped = routes - plan.kept.sum(dtype=jnp.float32)
        return y, Traffic(routes, dropped, plan.wanted.astype(jnp.float32) / capacity(capacity_factor, tokens, top_k))

    traffic = Traffic(routes, jnp.float32(0), jnp.float32(0))
    if chunks == 1:
        return run(x, experts, weights, accepted)[0], traffic
    padding = chunks * size - tokens

    def in_chunks(a, fill):
        return jnp.pad(a, ((0, padding), (0, 0)), constant_values=fill).reshape(chunks, size, a.shape[1])

    stacked = (in_chunks(x, 0), in_chunks(experts, num_experts), in_chunks(weights, 0))
    _, y = lax.scan(lambda _, chunk: (None, run(*chunk, accepted)[0]), None, stacked)
    return y.reshape(chunks * size, -1)[:tokens], traffic
