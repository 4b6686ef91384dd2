"""The gated activation of every MLP here."""

import functools

import jax
from jaxtyping import Array, Float


def swiglu(gate_up: Float[Array, "*batch 2 F"]) -> Float[Array, "*batch F"]:
    """silu(gate) * up, where gate_up[..., 0, :] is the gate and gate_up[..., 1, :] is up (Shazeer 2020).

    The backward pass keeps gate_up alone, not the parts of the product.
    """
    return _gated(gate_up)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate_up):
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
