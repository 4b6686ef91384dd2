"""Root-mean-square normalisation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "*batch D"]:
    """Scale x to unit mean square over the last dim, times `scale` (Zhang & Sennrich 2019). Float32 inside, dtype of x outside."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)
