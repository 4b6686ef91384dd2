"""The chunked loss against full logits in float64, and what memory it asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.cross_entropy import cross_entropy
from moejax.testing import assert_trees_close

TOKENS, DIM, VOCAB = 30, 6, 43


def inputs(dtype="float32", scale=1.0):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(TOKENS, DIM)) * scale, dtype)
    w = jnp.asarray(rng.normal(size=(DIM, VOCAB)), dtype)
    labels = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    labels[:2] = 0, VOCAB - 1  # the ends of the first and the last chunk
    labels[5:9] = -1, -1, -7, -100
    return x, w, jnp.asarray(labels), rng.normal(size=(2, TOKENS)).astype(np.float32)


def summed(x, w, labels, pull, chunk):
    """Both results, weighted, so that one gradient covers both."""
    nll, lse = cross_entropy(x, w, labels, chunk=chunk)
    return (pull[0] * nll).sum() + (pull[1] * lse).sum(), (nll, lse)


run = jax.jit(jax.value_and_grad(summed, argnums=(0, 1), has_aux=True), static_argnames="chunk")


def exact(x, w, labels, pull):
    """The same in float64 from all logits, with the gradients worked out by hand."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    labels = np.asarray(labels)
    logits = x @ w
    top = logits.max(axis=1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    hit = labels[:, None] == np.arange(VOCAB)[None, :]
    d_logits = np.exp(logits - lse[:, None]) * (pull[0] + pull[1])[:, None] - hit * pull[0][:, None]
    return {"nll": lse - (hit * logits).sum(axis=1), "lse": lse, "dx": d_logits @ w.T, "dw": x.T @ d_logits}


def ours(x, w, labels, pull, chunk):
    (_, (nll, lse)), (dx, dw) = run(x, w, labels, pull, chunk=chunk)
    assert nll.dtype == lse.dtype == jnp.float32
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    return {"nll": nll, "lse": lse, "dx": dx, "dw": dw}


@pytest.mark.parametrize("chunk", [1, 10, 42, 43, 1000])
def test_loss_and_gradients_equal_full_logits_for_any_chunk(chunk):
    case = inputs()
    assert_trees_close(ours(*case, chunk), exact(*case), "float32", f"chunk {chunk}")


def test_bfloat16_weights_have_float32_logits():
    case = inputs("bfloat16")
    result, truth = ours(*case, 10), exact(*case)
    assert_trees_close(result, truth, "bfloat16", "bfloat16")
    # Products of bfloat16 numbers are exact in float32, so losses are as good as in float32.
    for name in ("nll", "lse"):
        assert_trees_close({name: result[name]}, {name: truth[name]}, "float32", "bfloat16 losses")


def test_logits_of_hundreds_do_not_overflow():
    case = inputs(scale=300.0)
    result = ours(*case, 10)
    assert float(jnp.max(result["lse"])) > 500
    assert_trees_close(result, exact(*case), "float32", "large logits")


def test_a_negative_label_has_no_likelihood():
    result = ours(*inputs(), 10)
    np.testing.assert_array_equal(result["nll"][5:9], result["lse"][5:9])


def largest_array(jaxpr) -> int:
    """Elements of the largest array anywhere in a jaxpr, bodies of loops and functions included."""
    sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
    params = [value for eqn in jaxpr.eqns for value in jax.tree.leaves(list(eqn.params.values()))]
    bodies = [getattr(value, "jaxpr", value) for value in params]
    return max(sizes + [largest_array(body) for body in bodies if hasattr(body, "eqns")], default=0)


@pytest.mark.parametrize(("chunk", "held_at_once"), [(64, 64), (4096, 4096)])
def test_forward_and_backward_never_hold_more_than_a_chunk_of_logits(chunk, held_at_once):
    tokens, dim, vocab = 512, 2, 4096
    x, w = jax.ShapeDtypeStruct((tokens, dim), jnp.float32), jax.ShapeDtypeStruct((dim, vocab), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(x, w, labels):
        return sum(part.sum() for part in cross_entropy(x, w, labels, chunk=chunk))

    for function in (loss, jax.grad(loss, argnums=(0, 1))):
        assert largest_array(jax.make_jaxpr(function)(x, w, labels).jaxpr) == tokens * held_at_once
