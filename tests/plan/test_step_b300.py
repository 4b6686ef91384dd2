"""The training step, compiled for 64 B300: what it sends, what it holds, which kernels it runs. Run with -s to see the tables."""

import pytest

from moejax.plan.traffic import host_transfers
from tests.plan.programs import (
    assert_arguments_equal_the_formula,
    assert_memory_is_explained,
    assert_rows_move,
    assert_traffic_is_minimal,
    assert_weights_move_once,
    eight_layers,
    show,
)

pytestmark = pytest.mark.slow


def test_sixty_four_b300_send_rows_and_weights_and_nothing_else():
    config = eight_layers(dp=8, ep=8, num_experts=128, recompute="selective")
    program = show(config, "b300")
    assert_rows_move(config, program, 4)
    assert_traffic_is_minimal(config, program)
    assert_weights_move_once(program)
    assert_arguments_equal_the_formula(config, program)
    assert_memory_is_explained(config, program)


def test_offloading_sends_the_named_results_to_the_host_and_back_and_nothing_else():
    config = eight_layers(dp=8, ep=8, num_experts=128, recompute="offload")
    program = show(config, "b300")
    assert_rows_move(config, program, 6)
    assert_traffic_is_minimal(config, program)
    block_in = 8192 * 4096 * 2
    assert {transfer.size_bytes for transfer in host_transfers(program.hlo)} == {block_in}
    assert sum(transfer.times for transfer in host_transfers(program.hlo)) == 2 * config.model.num_layers * config.microbatches
