"""Which blocks stages hold, and where their arrays lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.parallel.pipeline import build
from moejax.parallel.pipeline.split import split_blocks


def test_the_first_stages_hold_one_block_more_where_they_do_not_divide():
    split = split_blocks(9, build("interleaved", 2, 1, 2).order.place, 2)
    assert split.blocks.tolist() == [[[0, 1, 2], [5, 6, -1]], [[3, 4, -1], [7, 8, -1]]]
    assert split.places.tolist() == [0, 1, 2, 6, 7, 3, 4, 9, 10]
    assert split.is_padded
    assert not split.is_natural


def test_one_stage_on_each_rank_keeps_the_order_and_a_v_does_not():
    assert split_blocks(8, (0, 1, 2, 3), 4).is_natural
    assert split_blocks(4, (0, 1, 1, 0), 2).order.tolist() == [0, 3, 1, 2]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_every_block_has_one_place_and_stages_follow_each_other(ranks, virtual, more):
    stages, place = ranks * virtual, tuple(stage % ranks for stage in range(ranks * virtual))
    split = split_blocks(stages + more, place, ranks)
    assert sorted(split.order[split.order >= 0].tolist()) == list(range(stages + more))
    np.testing.assert_array_equal(split.order[split.places], np.arange(stages + more))
    in_turn = [block for stage in range(stages) for block in split.blocks[stage % ranks, stage // ranks].tolist() if block >= 0]
    assert in_turn == list(range(stages + more))
    counts = (split.blocks >= 0).sum(axis=-1)
    assert counts.max() - counts.min() <= 1


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ValueError, match="3 blocks cannot be split over 4 stages"):
        split_blocks(3, (0, 1, 2, 3), 4)
