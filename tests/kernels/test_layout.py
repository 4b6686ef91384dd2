"""The tile-aligned layout against one expert after the other in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax_kernels.grouped_matmul import align_up, aligned_starts, buffer_rows
from moejax_kernels.grouped_matmul.layout import tile_experts


@pytest.mark.parametrize(("n", "tile", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (5, 1, 5)])
def test_align_up(n, tile, expected):
    assert align_up(n, tile) == expected
    assert align_up(jnp.array([n], jnp.int32), tile).tolist() == [expected]


def test_the_example_of_the_drawing():
    sizes = jnp.array([3, 0, 5], jnp.int32)
    assert aligned_starts(sizes, 4).tolist() == [0, 4, 4]
    experts, in_use = tile_experts(sizes, 4, 4)
    assert experts.tolist() == [0, 2, 2, 2]
    assert int(in_use) == 3


NUM_TILES = buffer_rows(100, 5, 4) // 4
layout = jax.jit(lambda sizes: (aligned_starts(sizes, 4), *tile_experts(sizes, NUM_TILES, 4)))


@given(st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_tiles_and_starts_of_any_sizes(sizes):
    starts, owners = [], []
    for e, size in enumerate(sizes):
        starts.append(len(owners) * 4)
        owners += [e] * -(-size // 4)
    ours, experts, in_use = layout(np.array(sizes, np.int32))
    assert ours.tolist() == starts
    assert int(in_use) == len(owners) <= NUM_TILES
    np.testing.assert_array_equal(experts[: len(owners)], owners)
    assert max(experts.tolist()) <= 4  # unused tiles name an expert that exists
