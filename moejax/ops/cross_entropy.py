"""Next-token loss over a large vocabulary without ever holding all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int


def cross_entropy(
    x: Float[Array, "BT D"], w_head: Float[Array, "D V"], labels: Int[Array, " BT"], *, chunk: int
) -> tuple[Float[Array, " BT"], Float[Array, " BT"]]:
    """Negative log likelihood of the labels and logsumexp of the logits, both float32 [BT].

    Logits are float32 and exist for `chunk` vocabulary entries at a time, forward and backward. A negative label has
    no likelihood: its first result is its logsumexp, and the caller masks it.
    """
    lse, label_logit = _logits_summary(x, w_head, labels, chunk)
    return lse - label_logit, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _logits_summary(x, w_head, labels, chunk):
    """logsumexp over the vocabulary and the label's logit, by an online maximum over chunks."""
    w, width = _in_chunks(w_head, chunk)

    def add_chunk(carry, indexed):
        top, total, label_logit = carry
        i, w_chunk = indexed
        logits = _chunk_logits(x, w_chunk, i, width, w_head.shape[1])
        new_top = jnp.maximum(top, logits.max(axis=-1))
        total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=-1)
        hit = _label_hits(labels, i, width)
        return (new_top, total, label_logit + jnp.where(hit, logits, 0.0).sum(axis=-1)), None

    zero = jnp.zeros(x.shape[:1], jnp.float32)
    (top, total, label_logit), _ = lax.scan(add_chunk, (zero - jnp.inf, zero, zero), (jnp.arange(w.shape[0]), w))
    return jnp.log(total) + top, label_logit


def _forward(x, w_head, labels, chunk):
    lse, label_logit = _logits_summary(x, w_head, labels, chunk)
    return (lse, label_logit), (x, w_head, labels, lse)


def _backward(chunk, residuals, cotangents):
    x, w_head, labels, lse = residuals
    d_lse, d_label = cotangents
    w, width = _in_chunks(w_head, chunk)

    def add_chunk(dx, indexed):
        i, w_chunk = indexed
        logits = _chunk_logits(x, w_chunk, i, width, w_head.shape[1])
        d_logits = jnp.exp(logits - lse[:, None]) * d_lse[:, None] + jnp.where(_label_hits(labels, i, width), d_label[:, None], 0.0)
        d_logits = d_logits.astype(x.dtype)
        dx = dx + jnp.dot(d_logits, w_chunk.T, preferred_element_type=jnp.float32)
        return dx, jnp.dot(x.T, d_logits, preferred_element_type=jnp.float32).astype(w_head.dtype)

    dx, dw = lax.scan(add_chunk, jnp.zeros(x.shape, jnp.float32), (jnp.arange(w.shape[0]), w))
    dw = jnp.moveaxis(dw, 0, 1).reshape(x.shape[1], -1)[:, : w_head.shape[1]]
    return dx.astype(x.dtype), dw, np.zeros(labels.shape, jax.dtypes.float0)


_logits_summary.defvjp(_forward, _backward)


def _in_chunks(w_head, chunk):
    """w_head as [chunks, D, width] with equal widths; the last one is filled up with zeros."""
    dim, vocab = w_head.shape
    count = -(-vocab // chunk)
    width = -(-vocab // count)
    padded = jnp.pad(w_head, ((0, 0), (0, count * width - vocab)))
    return jnp.moveaxis(padded.reshape(dim, count, width), 1, 0), width


def _chunk_logits(x, w_chunk, i, width, vocab):
    logits = jnp.dot(x, w_chunk, preferred_element_type=jnp.float32)
    return jnp.where(i * width + jnp.arange(width)[None, :] < vocab, logits, -jnp.inf)


def _label_hits(labels, i, width):
    return labels[:, None] == i * width + jnp.arange(width)[None, :]
