"""Programs of float32 arrays, run in float64 without their own derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moejax.verify.float64 import in_float64

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


@jax.custom_vjp
def wrong(x):
    return x * x


wrong.defvjp(lambda x: (x * x, x), lambda x, dy: (100 * dy,))

PROGRAMS = {
    "casts": (lambda x: (x.astype(jnp.bfloat16) / 3).astype(jnp.float32), lambda x: x / 3),
    "sums": (lambda x: jnp.sum(x.astype(jnp.bfloat16), dtype=jnp.float32), lambda x: x.sum()),
    "products": (lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.float32), lambda x: x @ x.T),
    "scans": (lambda x: lax.scan(lambda c, row: (c + row, c * row), x[0], x), None),
    "scans of nothing": (lambda x: lax.scan(lambda c, _: (2 * c, None), x, None, length=3)[0], lambda x: 8 * x),
    "branches": (lambda x: lax.cond(x[0, 0] < 0, lambda y: y / 7, lambda y: y, x), lambda x: x / 7),
    "recomputation": (jax.checkpoint(lambda x: jnp.sin(x) / 3), lambda x: np.sin(x) / 3),
    "scatters": (lambda x: jnp.zeros(4).at[jnp.array([1, 1, 2])].add(x[:, 0]).at[0].set(x[1, 1]), None),
    "own derivatives": (wrong, lambda x: x * x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_float64(name):
    program, expected = PROGRAMS[name]
    with jax.enable_x64(True):
        wide = X.astype(np.float64)
        got = jax.jit(in_float64(program, jax.ShapeDtypeStruct(X.shape, jnp.float32)))(wide)
        truth = program(wide) if expected is None else expected(wide)
        for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(truth), strict=True):
            assert have.dtype == np.float64
            np.testing.assert_allclose(have, want, rtol=2e-7 if name == "casts" else 1e-12)


def test_a_derivative_of_its_own_is_left_out():
    with jax.enable_x64(True):
        gradient = jax.grad(lambda x: in_float64(wrong, X)(x).sum())(X.astype(np.float64))
        np.testing.assert_allclose(gradient, 2 * X, rtol=1e-12)


def test_integers_stay_as_wide_as_they_are():
    with jax.enable_x64(True):
        assert in_float64(lambda i: i * 3, np.int32(2))(np.int32(2)).dtype == np.int32


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c + 1, x), "a loop of unknown length"),
        (lambda x: lax.bitcast_convert_type(x, jnp.uint32), "the bits of a float"),
    ],
)
def test_what_cannot_be_widened_is_refused(program, message):
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=message):
        in_float64(program, X)(X.astype(np.float64))
