"""ring: all-gather of tokens, reduce-scatter of sums; collectives that every device and network runs well, as rings.

A move carries ep * T rows whatever top_k is, against T * A of the row transports, so it is worth a try where top_k comes near
ep. Combine and the gradient of dispatch travel in float32, like every sum here. Beside the buffer a rank holds all ranks' tokens
(ep * T * D in the compute dtype) and the sums for them (ep * T * D in float32).
"""

from jax import lax

from moejax.parallel.expert.transports.tokens import token_transport


def _share(x, axis):
    return lax.all_gather(x, axis, tiled=True)


def _reduce(x, axis):
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


RING = token_transport("ring", _share, _reduce)
