"""Root-mean-square norm against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.norm import rms_norm
from moejax.testing import assert_trees_close

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8,), (3, 5), (2, 3, 2, 7)])
def test_last_dim_has_unit_mean_square_times_the_scale(shape, dtype):
    x = jnp.asarray(RNG.normal(size=shape) * 40, dtype)
    scale = jnp.asarray(RNG.normal(size=shape[-1:]) + 1, "float32")
    y = jax.jit(rms_norm, static_argnames="eps")(x, scale, eps=1e-5)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
    assert y.dtype == x.dtype
    assert_trees_close({"y": y}, {"y": exact}, dtype, "rms_norm")


def test_a_row_of_zeros_stays_zero_with_a_finite_gradient():
    x, scale = jnp.zeros((2, 4)), jnp.ones(4)
    y, dx = jax.value_and_grad(lambda x: rms_norm(x, scale, eps=1e-6).sum())(x)
    assert float(y) == 0
    np.testing.assert_allclose(dx, 1e3, rtol=1e-5)  # 1 / sqrt(eps)


def test_squares_of_bfloat16_are_summed_in_float32():
    # In bfloat16 a sum of 4096 ones would stop at 256.
    x = jnp.ones((1, 4096), jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(4096), eps=0.0).astype(jnp.float32), 1.0)
