"""The training step, compiled for eight H200: what it sends, what it holds, which kernels it runs. Run with -s to see the tables."""

import pytest

from tests.plan.programs import (
    assert_arguments_equal_the_formula,
    assert_memory_is_explained,
    assert_rows_move,
    assert_traffic_is_minimal,
    assert_weights_move_once,
    eight_layers,
    show,
    with_fsdp,
)

pytestmark = pytest.mark.slow

MOVES = {"none": 4, "block": 6}


@pytest.mark.parametrize("mode", MOVES)
def test_eight_h200_send_rows_and_weights_and_nothing_else(mode):
    config = eight_layers(dp=1, ep=8, num_experts=64, recompute=mode)
    program = show(config, "h200")
    assert_rows_move(config, program, MOVES[mode])
    assert_traffic_is_minimal(config, program)
    assert_weights_move_once(program)
    assert_arguments_equal_the_formula(config, program)
    assert_memory_is_explained(config, program)


def test_fsdp_gathers_every_layer_twice_in_each_microbatch():
    config = with_fsdp(eight_layers(dp=2, ep=4, num_experts=64, recompute="block"))
    program = show(config, "h200")
    assert_rows_move(config, program, 6)
    assert_traffic_is_minimal(config, program)
    assert_arguments_equal_the_formula(config, program)
