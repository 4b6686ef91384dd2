"""Layers with known windows: how a stack is cut into loops."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moejax.nn.segments import Segment, split

F = -1


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((F,) * 7, [((F,), 7)]),
        ((4, F) * 3, [((4, F), 3)]),
        ((4, 4, 4, F) * 2, [((4, 4, 4, F), 2)]),
        ((F, 4, 4, F, 4, 4, 4, F, 4, 4, 4, F), [((F,), 1), ((4,), 2), ((F, 4, 4, 4), 2), ((F,), 1)]),
        ((F, 4, 4, 4, F), [((F,), 1), ((4,), 3), ((F,), 1)]),
        ((4, 2), [((4, 2), 1)]),
    ],
)
def test_a_stack_is_cut_into_the_fewest_compiled_blocks(windows, expected):
    segments = split(windows)
    assert sum(len(s.period) for s in segments) == sum(len(period) for period, _ in expected)
    assert len(segments) == len(expected)
    assert laid_out(segments) == windows


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple))
def test_segments_give_the_windows_back_and_never_more_blocks_than_runs(windows):
    segments = split(windows)
    runs = 1 + sum(a != b for a, b in itertools.pairwise(windows))
    assert laid_out(segments) == windows
    assert sum(len(s.period) for s in segments) <= runs


def laid_out(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    return sum((s.period * s.repeats for s in segments), ())
