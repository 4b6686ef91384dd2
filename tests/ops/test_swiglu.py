import jax
import jax.numpy as jnp
import numpy as np

from moejax.ops.swiglu import swiglu
from moejax.testing import assert_trees_close


def test_the_first_half_gates_the_second():
    gate_up = np.random.default_rng(0).normal(size=(3, 4, 2, 5)) * 3
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    y = jax.jit(swiglu)(jnp.asarray(gate_up, jnp.float32))
    assert_trees_close({"y": y}, {"y": gate / (1 + np.exp(-gate)) * up}, "float32", "swiglu")


def test_extreme_gates_stay_finite():
    gate_up = jnp.array([[1e4, -1e4], [2.0, 2.0]])
    np.testing.assert_array_equal(swiglu(gate_up), [2e4, 0.0])
    assert np.isfinite(jax.grad(lambda x: swiglu(x).sum())(gate_up)).all()
