"""The gated activation of every MLP here."""

import jax
from jaxtyping import Array, Float


def swiglu(gate_up: Float[Array, "*batch 2 F"]) -> Float[Array, "*batch F"]:
    """silu(gate) * up, where gate_up[..., 0, :] is the gate and gate_up[..., 1, :] is up (Shazeer 2020)."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
