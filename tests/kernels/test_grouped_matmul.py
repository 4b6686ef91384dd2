"""Every implementation that runs on a CPU against a loop over experts in float64; test_mosaic.py has the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.testing import assert_trees_close
from moejax_kernels.grouped_matmul import align_up, buffer_rows, cpu, grouped_matmul
from tests.kernels.grouped import case, exact

TILE = 8
IMPLEMENTATIONS = ("reference", "cpu")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.partial(jax.jit, static_argnames=("tile", "implementation"))
def run(x, w, dy, sizes, *, tile=TILE, implementation):
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, tile=tile, implementation=implementation), x, w)
    dx, dw = pullback(dy)
    return {"y": y, "dx": dx, "dw": dw}


def check(sizes, implementation, *, rows=None, tile=TILE, width=(5, 6), dtype="float32", seed=0):
    """Forward and both gradients; `rows` real rows must fit whatever their split. Returns what came out."""
    buffer = buffer_rows(rows or max(sum(sizes), 1), len(sizes), tile)
    arrays = case(sizes, buffer, width, tile, dtype, seed)
    result = jax.device_get(run(*arrays, np.array(sizes, np.int32), tile=tile, implementation=implementation))
    assert all(value.dtype == arrays[0].dtype for value in result.values())
    assert_trees_close(result, exact(*arrays, sizes, tile), dtype, f"{implementation} {sizes}")
    for e, size in enumerate(sizes):
        assert size or not result["dw"][e].any(), f"expert {e} has no rows, but a gradient"
    return result


ROWS = 48
CASES = {
    "no row at all": [0, 0, 0, 0],
    "one row": [0, 1, 0, 0],
    "one row each": [1, 1, 1, 1],
    "multiples of the tile": [8, 16, 24, 0],
    "one below and one above a multiple": [7, 9, 15, 17],
    "all rows in the first expert": [48, 0, 0, 0],
    "all rows in the last expert": [0, 0, 0, 45],
}


@every_implementation
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_product_and_gradients_equal_a_loop_over_experts(sizes, implementation):
    check(sizes, implementation, rows=ROWS)


@every_implementation
@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0] * 6 + [32] + [0] * 11], ids=["every second empty", "one of eighteen"])
def test_p05_weight_gradients_of_empty_groups_are_exactly_zero_at_odd_widths(sizes, implementation):
    check(sizes, implementation, width=(32, 43))


@every_implementation
@pytest.mark.parametrize("sizes", [[0] * 63 + [1], [100]], ids=["p15 one row and 64 experts", "p12 one expert and a padded buffer"])
def test_experts_at_their_fewest_and_rows_at_their_fewest(sizes, implementation):
    check(sizes, implementation)


@every_implementation
def test_odd_and_single_widths(implementation):
    check([3, 0, 10], implementation, width=(43, 1))


@every_implementation
@pytest.mark.parametrize("tile", [1, 128])
def test_any_tile(tile, implementation):
    check([3, 0, 10], implementation, tile=tile)


@every_implementation
def test_bfloat16_accumulates_in_float32(implementation):
    check([9, 0, 20, 3], implementation, dtype="bfloat16")
    # In bfloat16 a sum of ones would stop at 256.
    x, w, dy = (jnp.ones(shape, jnp.bfloat16) for shape in ((512, 512), (1, 512, 4), (512, 4)))
    result = run(x, w, dy, jnp.array([512], jnp.int32), implementation=implementation)
    for name, terms in (("y", 512), ("dx", 4), ("dw", 512)):
        np.testing.assert_array_equal(result[name].astype(jnp.float32), terms)


BUSY = [40] * 20 + [200] + [0] * 3 + [43] * 7 + [90]


@pytest.mark.parametrize("tile", [1, TILE])
def test_experts_far_above_the_mean(tile):
    check(BUSY, "cpu", tile=tile)


@pytest.mark.parametrize(("sizes", "is_batched", "chunks"), [(BUSY, True, 3 + 1), ([0] * 31 + [1400], False, 22), ([0] * 32, False, 0)])
def test_on_cpu_the_load_decides_between_one_batch_and_chunks_alone(sizes, is_batched, chunks):
    split = cpu._split(jnp.array(sizes, jnp.int32), 1400, 1)
    assert (bool(split.is_batched), int(split.steps)) == (is_batched, -(-chunks // cpu._LANES))


@every_implementation
def test_a_row_that_is_not_finite_stays_with_its_expert(implementation):
    x, w, dy = case(BUSY, sum(BUSY), (5, 6), 1)
    expected = jax.device_get(run(x, w, dy, jnp.array(BUSY, jnp.int32), tile=1, implementation=implementation))
    x, dy = x.at[800].set(jnp.nan), dy.at[801].set(jnp.inf)  # the busiest expert has rows 800 to 999
    result = jax.device_get(run(x, w, dy, jnp.array(BUSY, jnp.int32), tile=1, implementation=implementation))
    others = {"y": np.arange(sum(BUSY)) != 800, "dx": np.arange(sum(BUSY)) != 801, "dw": np.arange(len(BUSY)) != 20}
    for name, rows in others.items():
        np.testing.assert_array_equal(result[name][rows], expected[name][rows])


@every_implementation
@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, ROWS), min_size=3, max_size=3), seed=st.integers(0, 9))
def test_any_split_of_the_rows(implementation, cuts, seed):
    edges = [0, *sorted(cuts), ROWS]
    check(np.diff(edges).tolist(), implementation, rows=ROWS, seed=seed)


@every_implementation
def test_experts_that_lose_their_rows_have_zero_gradient_again(implementation):
    """P06: nothing is left over from a call in which every expert had rows."""
    before = check([10, 10, 10, 10], implementation, rows=ROWS)
    after = check([40, 0, 0, 0], implementation, rows=ROWS, seed=1)
    again = check([10, 10, 10, 10], implementation, rows=ROWS)
    assert not after["dw"][1:].any()
    jax.tree.map(np.testing.assert_array_equal, again, before)


@every_implementation
def test_several_output_dims_count_as_one(implementation):
    x, w, dy = case([5, 0, 3], 24, (5, 6), TILE, "float32", 0)
    sizes = np.array([5, 0, 3], np.int32)
    flat = run(x, w, dy, sizes, implementation=implementation)
    split = run(x, w.reshape(3, 5, 2, 3), dy.reshape(-1, 2, 3), sizes, implementation=implementation)
    assert split["y"].shape == (24, 2, 3)
    assert split["dw"].shape == (3, 5, 2, 3)
    for name, value in flat.items():
        np.testing.assert_array_equal(np.asarray(split[name]).reshape(value.shape), value)


@every_implementation
def test_rows_past_the_last_expert_come_out_zero(implementation):
    x, w, dy = case([5, 3], 32, (5, 6), TILE)
    y = np.asarray(run(x, w, dy, jnp.array([5, 3], jnp.int32), implementation=implementation)["y"])
    assert not y[5:8].any()
    assert not y[11:].any()


@every_implementation
def test_a_buffer_can_be_larger_than_its_rows(implementation):
    x, w, dy = case([5, 3], 80, (5, 6), TILE)
    result = run(x, w, dy, jnp.array([5, 3], jnp.int32), implementation=implementation)
    assert_trees_close(result, exact(x, w, dy, [5, 3], TILE), "float32", implementation)


@pytest.mark.parametrize(
    ("x", "w", "sizes", "message"),
    [
        ((16, 5), (2, 4, 6), (2,), r"x \(16, 5\), w \(2, 4, 6\) and group_sizes \(2,\) do not fit \[M K\], \[E K \*N\], \[E\]"),
        ((16, 5), (2, 5, 6, 7), (3,), "do not fit"),
        ((16, 5, 1), (2, 5, 6), (2,), "do not fit"),
        ((15, 5), (2, 5, 6), (2,), "x has 15 rows, not a multiple of tile=8"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, w, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(x), jnp.zeros(w), jnp.zeros(sizes, jnp.int32), tile=TILE)


def test_unequal_dtypes_are_refused():
    with pytest.raises(ValueError, match="x is bfloat16 and w is float32; cast one of them"):
        grouped_matmul(jnp.zeros((8, 4), jnp.bfloat16), jnp.zeros((1, 4, 4)), jnp.zeros(1, jnp.int32), tile=TILE)


def test_buffers_hold_the_worst_split():
    for rows, experts, tile in [(1, 1, 8), (40, 5, 8), (7, 3, 4), (64, 64, 128), (1000, 8, 1)]:
        # The worst split leaves one row more than a multiple of the tile in as many experts as there are rows for.
        worst, left = 0, rows
        for e in range(experts):
            size = left if e == experts - 1 else min(1, left)
            worst += align_up(size, tile)
            left -= size
        assert worst <= buffer_rows(rows, experts, tile)
        assert buffer_rows(rows, experts, tile) % tile == 0
