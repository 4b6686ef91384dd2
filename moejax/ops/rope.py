"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope(x: Float[Array, "B T N H"], positions: Int[Array, "B T"], *, theta: float) -> Float[Array, "B T N H"]:
    """Turn the pairs (x[i], x[i + H/2]) by the angle position * theta^(-2i/H) (Su et al. 2021). Float32 inside."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
