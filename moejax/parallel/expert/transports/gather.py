"""gather: all-gather and a local choice of rows. Pure copies, on any device; the default on CPU and the plainest definition.

A rank receives the routes of all ranks (ep * T * A rows) on the way there, and all buffers (ep * rows) on the way back.
"""

import jax.numpy as jnp
from jax import lax

from moejax.parallel.expert.plan import row_sources, rows_of_routes
from moejax.parallel.expert.transports.rows import row_transport, take_or_zero


def _prepare(plan, axis):
    """Of each row the sorted route among all ranks', of each route the row among all ranks'; past the end where there is none."""
    ranks, routes = lax.axis_size(axis), plan.order.shape[0]
    source, place, is_real = row_sources(plan)
    return jnp.where(is_real, source * routes + place, ranks * routes), rows_of_routes(plan)


def _there(routes, plan, moves, axis):
    return take_or_zero(lax.all_gather(routes, axis, tiled=True), moves[0])


def _back(y, plan, moves, axis):
    return take_or_zero(lax.all_gather(y, axis, tiled=True), moves[1])


GATHER = row_transport("gather", _there, _back, _prepare)
