"""ragged: XLA's ragged all-to-all. Each kept row travels once, straight to its place in the expert's buffer; nothing else is held.

Runs on GPUs with XLA's default flags: as a kernel that writes to peers where the ranks share an NVLink domain, else in two stages
between and inside hosts. What XLA does without a fast path is an error and not a slow copy that waits for the host; keep it so
(xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback stays false).
"""

import jax.numpy as jnp
from jax import lax

from moejax.parallel.expert.transports.rows import row_transport

_FAULTY_ABOVE = 32  # ranks


def _there(routes, plan, moves, axis):
    empty = jnp.zeros((plan.rows, routes.shape[1]), routes.dtype)
    return lax.ragged_all_to_all(routes, empty, plan.send_offset, plan.send_size, plan.send_start, plan.receive_size, axis_name=axis)


def _back(y, plan, moves, axis):
    empty = jnp.zeros((plan.order.shape[0], y.shape[1]), y.dtype)
    routes = lax.ragged_all_to_all(y, empty, plan.receive_start, plan.receive_size, plan.receive_origin, plan.send_size, axis_name=axis)
    return routes[plan.place]


def _refusal(platform, ranks):
    return "needs GPUs: XLA has no ragged all-to-all on CPU; use gather or auto" if platform == "cpu" else None


def _warning(platform, ranks):
    if ranks <= _FAULTY_ABOVE:
        return None
    return (
        "may fail with CUDA_ERROR_ILLEGAL_ADDRESS: XLA's one-shot kernel is known to, above 32 ranks in one NVLink domain "
        "(https://github.com/openxla/xla/issues/47283); if it does, use ring or dense, or start with "
        "XLA_FLAGS=--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
    )


RAGGED = row_transport("ragged", _there, _back, refusal=_refusal, warning=_warning)
