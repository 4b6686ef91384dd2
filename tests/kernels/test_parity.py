"""P14: at the widths of real models every implementation is right to the last bits of bfloat16, not only at toy sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax_kernels.grouped_matmul import buffer_rows, grouped_matmul
from tests.kernels.grouped import case, exact
from tests.kernels.interpreted import GPUS, traced_as_if_on

TILE = 128


def last_places(actual, truth):
    """Errors in units of the last place of bfloat16 at the true value, taken as at least 1/64 of its array's root mean square."""
    size = np.maximum(np.abs(truth), np.sqrt(np.mean(truth**2)) / 64)
    return np.abs(np.asarray(actual, np.float64) - truth) / 2.0 ** (np.floor(np.log2(size)) - 7)


def worst_errors(implementation, sizes, buffer, width):
    x, w, dy = case(sizes, buffer, width, TILE, "bfloat16")

    @jax.jit
    def run(x, w, dy, sizes):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, tile=TILE, implementation=implementation), x, w)
        dx, dw = pullback(dy)
        return {"y": y, "dx": dx, "dw": dw}

    result, truth = run(x, w, dy, jnp.array(sizes, jnp.int32)), exact(x, w, dy, sizes, TILE)
    return {name: float(last_places(result[name], truth[name]).max()) for name in truth}


def check(errors):
    # Half a unit is the rounding of the result; sums of up to 4096 products in float32 add a few hundredths.
    assert max(errors.values()) < 0.55, errors


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_p14_bfloat16_is_right_to_the_last_place_at_real_widths(implementation):
    sizes = [1000, 0, 2500, 1, 595]
    check(worst_errors(implementation, sizes, buffer_rows(sum(sizes), len(sizes), TILE), (1024, 2048)))


@pytest.mark.slow
@pytest.mark.parametrize("generation", GPUS)
def test_p14_kernels_are_right_to_the_last_place_at_real_widths(generation):
    """One tile of rows and a quarter of the columns: each step of 128 x 128 x 64 takes the interpreter 50 ms."""
    with traced_as_if_on(GPUS[generation], 2, detect_races=False):
        check(worst_errors("mosaic", [100], TILE, (1024, 512)))
