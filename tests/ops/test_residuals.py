"""What the backward passes of elementwise operations keep: their arguments, and nothing of their size beside."""

import jax
import jax.numpy as jnp
import pytest

from moejax.nn.mlp import router_logits
from moejax.ops.norm import rms_norm
from moejax.ops.swiglu import swiglu

X, WIDE = jnp.ones((6, 32), jnp.bfloat16), jnp.ones((6, 2, 32), jnp.bfloat16)
CASES = {
    "rms_norm": (lambda x, scale: rms_norm(x, scale, eps=1e-6), (X, jnp.ones(32))),
    "swiglu": (swiglu, (WIDE,)),
    "router_logits": (router_logits, (X, jnp.ones((32, 4)))),
}


@pytest.mark.parametrize(("fn", "args"), CASES.values(), ids=CASES.keys())
def test_only_the_arguments_are_kept(fn, args):
    _, pullback = jax.vjp(fn, *args)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size >= X.size]
    assert sorted((leaf.shape, leaf.dtype) for leaf in kept) == [(args[0].shape, args[0].dtype)]
