"""Root-mean-square normalisation."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "*batch D"]:
    """Scale x to unit mean square over the last dim, times `scale` (Zhang & Sennrich 2019). Float32 inside, dtype of x outside.

    The backward pass keeps x alone: what is float32 is cheap to compute again and twice the size.
    """
    return _scaled(x, scale, eps)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _scaled(x, scale, eps):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)
