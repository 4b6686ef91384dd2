"""The Mosaic kernels of both GPU generations, interpreted on a CPU with race detection, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

from moejax_kernels.grouped_matmul import grouped_matmul, mosaic_sm90, mosaic_sm100, reference
from tests.kernels.grouped import case, exact
from tests.kernels.interpreted import GPUS, traced_as_if_on

TILE = 128
EXPERTS, TILES = 6, 5
WIDTH = (128, 64)  # 64 columns are half a tile
every_generation = pytest.mark.parametrize("generation", GPUS)


def product_and_gradients(x, w, dy, sizes):
    """Everything through the public function."""
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, tile=TILE, implementation="mosaic"), x, w)
    dx, dw = pullback(dy)
    return {"y": y, "dx": dx, "dw": dw}


@functools.cache
def interpreted(generation, experts=EXPERTS, tiles=TILES, width=WIDTH, cores=2):
    """It is compiled once for all group sizes."""
    shapes = ((tiles * TILE, width[0]), (experts, *width), (tiles * TILE, width[1]))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with traced_as_if_on(GPUS[generation], cores):
        # A function of its own: a trace is kept whatever device it was for.
        run = jax.jit(functools.partial(product_and_gradients))
        return run.lower(*arrays, jax.ShapeDtypeStruct((experts,), jnp.int32)).compile()


def check(run, sizes, *, tiles=TILES, width=WIDTH):
    """Everything but rounding to bfloat16 is exact to float32; rows past the last tile in use hold NaN and come out zero."""
    x, w, dy = case(sizes, tiles * TILE, width, TILE, "bfloat16")
    used = sum(-(-size // TILE) for size in sizes) * TILE
    result = run(x.at[used:].set(jnp.nan), w, dy.at[used:].set(jnp.nan), jnp.array(sizes, jnp.int32))
    truth = exact(x, w, dy, sizes, TILE)
    # Half a unit in the last place of bfloat16, and float32 sums of |a||b| in any order.
    magnitude = exact(abs(x), abs(w), abs(dy), sizes, TILE)
    for name, value in truth.items():
        assert result[name].dtype == jnp.bfloat16
        error = np.abs(np.asarray(result[name], np.float64) - value)
        limit = 2.0**-8 * np.abs(value) + 2.0**-20 * magnitude[name]
        assert (error <= limit).all(), f"{name}: {np.nanmax(error - limit)} beyond its rounding, {np.isnan(error).sum()} NaN"
    for e, size in enumerate(sizes):
        assert size or not np.asarray(result["dw"][e]).any(), f"expert {e} has no rows, but a gradient"


CASES = {
    "empty first, middle and last, one row, ragged tail, exact multiple": [0, 130, 0, 1, 128, 0],
    "no row at all": [0, 0, 0, 0, 0, 0],
}
MORE_CASES = {
    "exact multiples, unused tail": [128, 0, 256, 0, 0, 128],
    "all rows in one expert, every tile used": [0, 0, 0, 630, 0, 0],
}


@every_generation
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_product_and_gradients_equal_a_loop_over_experts(generation, sizes):
    check(interpreted(generation), sizes)


@pytest.mark.slow
@every_generation
@pytest.mark.parametrize("sizes", MORE_CASES.values(), ids=MORE_CASES.keys())
def test_product_and_gradients_of_more_group_sizes(generation, sizes):
    width = (192, 256)  # a tile and a half, and two tiles
    check(interpreted(generation, width=width), sizes, width=width)


@pytest.mark.slow
@every_generation
@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0] * 6 + [32] + [0] * 11], ids=["every second empty", "one of eighteen"])
def test_p05_weight_gradients_of_empty_groups_are_exactly_zero(generation, sizes):
    shape = {"tiles": 3, "width": (64, 64)}
    check(interpreted(generation, len(sizes), **shape, cores=3), sizes, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [WIDTH, (192, 256), (1024, 2880)])
@pytest.mark.parametrize("sizes", [*CASES.values(), *MORE_CASES.values(), [0] * 6 + [32] + [0] * 11])
def test_product_and_gradients_on_this_gpu(sizes, width):
    check(jax.jit(product_and_gradients), sizes, width=width)


@pytest.mark.slow
@every_generation
def test_the_gradient_is_that_of_the_definition(generation):
    sizes = CASES["empty first, middle and last, one row, ragged tail, exact multiple"]
    x, w, dy = case(sizes, TILES * TILE, WIDTH, TILE, "bfloat16", seed=1)
    ours = interpreted(generation)(x, w, dy, jnp.array(sizes, jnp.int32))

    def loss(x, w):
        return jnp.sum(reference.matmul(x, w, jnp.array(sizes, jnp.int32), TILE) * dy.astype(jnp.float32))

    for name, theirs in zip(("dx", "dw"), jax.grad(loss, argnums=(0, 1))(x.astype(jnp.float32), w.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(ours[name].astype(jnp.float32), theirs, rtol=2**-7, atol=1e-4)


class Without:
    """A module one of whose functions does nothing."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __getattr__(self, name):
        return (lambda *args, **kwargs: None) if name == self.name else getattr(self.module, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "generation", "wait"),
    [
        (mosaic_sm90, "sm90", "commit_smem"),
        (mosaic_sm90, "sm90", "wait_smem_to_gmem"),
        (mosaic_sm100, "sm100", "barrier_wait"),
        (mosaic_sm100, "sm100", "commit_smem"),
        (mosaic_sm100, "sm100", "wait_load_tmem"),
        (mosaic_sm100, "sm100", "wait_smem_to_gmem"),
    ],
)
def test_a_wait_that_is_missing_is_reported(body, generation, wait, monkeypatch):
    """What the other tests would show if a kernel did not wait where it must."""
    monkeypatch.setattr(body, "plgpu", Without(body.plgpu, wait))
    x, w = jnp.ones((3 * TILE, 64), jnp.bfloat16), jnp.ones((1, 64, 64), jnp.bfloat16)
    try:
        with traced_as_if_on(GPUS[generation], 1), pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED|Barrier|Not all"):
            jax.block_until_ready(grouped_matmul(x, w, jnp.array([3 * TILE], jnp.int32), tile=TILE, implementation="mosaic"))
    finally:
        reset_gpu_interpret_mode_state()
