"""Transports that share tokens instead of moving routes: every rank sees all ranks' tokens and adds up what its experts return.

Such a transport is two functions: `share` (an array of each rank -> all of them, in rank order) and `reduce` (the sum over ranks of
an array made for all of them -> this rank's part). Weights are applied on the expert's rank, before the sum.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.parallel.expert.plan import Plan, count_ranks, rows_of_routes
from moejax.parallel.expert.transports.rows import take_or_zero
from moejax.parallel.expert.transports.transport import Transport


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Meeting:
    """How my buffer and the routes of all ranks meet, int32. Routes are counted over all ranks: ep * R of them.

    route: [rows], the route in each row; ep * R where there is none.
    row: [ep * R], the row of each route; `rows` where it has none here.
    """

    route: Array
    row: Array


def token_transport(name: str, share: Callable[..., jax.Array], reduce: Callable[..., jax.Array]) -> Transport:
    """The transport made of two collectives, share(x, axis) and reduce(x, axis)."""

    def prepare(plan: Plan, axis: str | None) -> Meeting:
        me = 0 if count_ranks(axis) == 1 else lax.axis_index(axis)
        row = share(rows_of_routes(plan), axis) - me * plan.rows
        row = jnp.where((row >= 0) & (row < plan.rows), row, plan.rows)
        routes = jnp.arange(row.shape[0], dtype=jnp.int32)
        return Meeting(jnp.full((plan.rows,), row.shape[0], jnp.int32).at[row].set(routes, mode="drop"), row)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def dispatch(x: Float[Array, "T D"], plan: Plan, moves: Meeting, axis: str | None) -> Float[Array, "rows D"]:
        return dispatch_forward(x, plan, moves, axis)[0]

    def dispatch_forward(x, plan, moves, axis):
        x = share(x, axis)
        return _token_of_row(x, moves), (moves, x.shape[0])

    def dispatch_backward(axis, residuals, g):
        moves, tokens = residuals
        rows = moves.row.reshape(tokens, -1)
        sums = _sum_over_slots(g, rows, jnp.ones(rows.shape, jnp.float32))
        return reduce(sums, axis).astype(g.dtype), None, None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def combine(
        y: Float[Array, "rows D"], weights: Float[Array, "T A"], plan: Plan, moves: Meeting, axis: str | None
    ) -> Float[Array, "T D"]:
        return combine_forward(y, weights, plan, moves, axis)[0]

    def combine_forward(y, weights, plan, moves, axis):
        y, weights = checkpoint_name(y, "expert_out"), share(weights, axis)
        sums = _sum_over_slots(y, moves.row.reshape(weights.shape), weights)
        return reduce(sums, axis).astype(y.dtype), (y, weights, moves)

    def combine_backward(axis, residuals, g):
        y, weights, moves = residuals
        # Rows without a route weigh nothing, so they may read any token: on CPU a third of the time of masking the gathered rows.
        is_real = moves.route < moves.row.shape[0]
        route = jnp.where(is_real, moves.route, 0)
        g_rows = share(g, axis).at[route // weights.shape[1]].get(mode="promise_in_bounds")
        of_row = jnp.where(is_real, weights.reshape(-1)[route], 0)
        products = jnp.sum(y.astype(jnp.float32) * g_rows.astype(jnp.float32), axis=1)
        d_weights = products.at[moves.row].get(mode="fill", fill_value=0).reshape(weights.shape)
        return g_rows * of_row[:, None].astype(g.dtype), reduce(d_weights, axis).astype(weights.dtype), None, None

    dispatch.defvjp(dispatch_forward, dispatch_backward)
    combine.defvjp(combine_forward, combine_backward)
    return Transport(name=name, prepare=prepare, dispatch=dispatch, combine=combine)


def _token_of_row(x, moves):
    """All ranks' tokens -> the token of each row, zero where no route lies."""
    top_k = moves.row.shape[0] // x.shape[0]
    return take_or_zero(x, moves.route // top_k)


def _sum_over_slots(y, rows, weights):
    """Each token's weighted sum of rows, in float32. Slot by slot, so that XLA fuses it into one loop that holds no copies of rows."""
    total = jnp.zeros((rows.shape[0], y.shape[1]), jnp.float32)
    for slot in range(rows.shape[1]):
        total = total + take_or_zero(y, rows[:, slot]).astype(jnp.float32) * weights[:, slot, None]
    return total
