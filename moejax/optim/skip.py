"""Skip a step whose loss or gradient norm is an outlier, decided on the device."""

import jax
import jax.numpy as jnp

from moejax.config import OptimConfig

History = dict[str, jax.Array]
"""loss, grad_norm: float32 [W], the last finite steps, oldest overwritten first; count: int32 [], finite steps so far."""


def empty_history(config: OptimConfig) -> History:
    zeros = jnp.zeros((config.skip_window,), jnp.float32)
    return {"loss": zeros, "grad_norm": zeros, "count": jnp.int32(0)}


def decide(config: OptimConfig, history: History, loss: jax.Array, grad_norm: jax.Array) -> tuple[jax.Array, jax.Array, History]:
    """Whether to apply this step, whether it is finite, and the new history.

    A non-finite loss or norm is never applied and never enters the history. With skip_sigma, a value more than that many
    (unbiased) deviations above the mean of the last skip_window steps is not applied, once half of them are known; it does
    enter the history, so that a lasting change of level ends the skipping.
    """
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    is_usual = jnp.bool_(True)
    if config.skip_sigma is not None:
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            is_usual &= _is_usual(history[name], history["count"], value, config.skip_sigma)
    slot = history["count"] % config.skip_window

    def append(values, value):
        return jnp.where(is_finite, values.at[slot].set(value), values)

    new = {
        "loss": append(history["loss"], loss),
        "grad_norm": append(history["grad_norm"], grad_norm),
        "count": history["count"] + is_finite.astype(jnp.int32),
    }
    return is_finite & is_usual, is_finite, new


def _is_usual(values, count, value, sigma):
    window = values.shape[0]
    known = jnp.minimum(count, window)
    is_known = jnp.arange(window) < known
    mean = jnp.where(is_known, values, 0.0).sum() / jnp.maximum(known, 1)
    variance = jnp.where(is_known, (values - mean) ** 2, 0.0).sum() / jnp.maximum(known - 1, 1)
    return (known < max(2, window // 2)) | (value - mean <= sigma * jnp.sqrt(variance))
