"""The training step, compiled for eight H200: what it sends, what it holds, which kernels it runs. Run with -s to see the tables."""

import jax
import pytest

from tests.plan.programs import (
    assert_arguments_equal_the_formula,
    assert_memory_is_explained,
    assert_rows_move,
    assert_traffic_is_minimal,
    assert_weights_move_once,
    compiled,
    eight_layers,
    show,
    with_fsdp,
)

pytestmark = pytest.mark.slow

MOVES = {"none": 4, "block": 6}
ARENA_GIB = {"none": 43.00, "block": 28.57}
"""XLA's arena beside the arguments when it was last looked at, with JAX 0.12.0.1."""


@pytest.mark.parametrize("mode", MOVES)
def test_eight_h200_send_rows_and_weights_and_nothing_else(mode):
    config = eight_layers(dp=1, ep=8, num_experts=64, recompute=mode)
    program = show(config, "h200")
    assert_rows_move(config, program, MOVES[mode])
    assert_traffic_is_minimal(config, program)
    assert_weights_move_once(program)
    assert_arguments_equal_the_formula(config, program)
    assert_memory_is_explained(config, program)


@pytest.mark.parametrize("mode", ARENA_GIB)
def test_p02_memory_has_not_grown_by_a_tenth(mode):
    """Another lowering of an operation can multiply it without changing a result."""
    program = compiled(eight_layers(dp=1, ep=8, num_experts=64, recompute=mode), "h200")
    arena = program.temp_bytes / 2**30
    assert arena < 1.1 * ARENA_GIB[mode], f"JAX {jax.__version__} needs {arena:.2f} GiB, JAX 0.12.0.1 needed {ARENA_GIB[mode]:.2f}"


def test_fsdp_gathers_every_layer_twice_in_each_microbatch():
    config = with_fsdp(eight_layers(dp=2, ep=4, num_experts=64, recompute="block"))
    program = show(config, "h200")
    assert_rows_move(config, program, 6)
    assert_traffic_is_minimal(config, program)
    assert_arguments_equal_the_formula(config, program)
