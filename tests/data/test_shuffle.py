import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data.shuffle import permute


def order(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), size, np.full(size, key, np.uint64))


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_every_number_comes_once(size, key):
    assert sorted(order(size, key)) == list(range(size))


def test_numbers_too_many_to_list_stay_distinct_and_inside():
    size = 10**15 + 7
    index = np.concatenate([np.arange(1000), size - 1 - np.arange(1000)])
    value = permute(index, size, np.zeros(2000, np.uint64))
    assert len(set(value.tolist())) == 2000
    assert value.min() >= 0
    assert value.max() < size
    assert abs(value.mean() / size - 0.5) < 0.05


def test_the_key_of_each_entry_decides():
    mixed = permute(np.arange(50), 50, np.arange(50).astype(np.uint64) % np.uint64(2))
    assert np.array_equal(mixed, np.where(np.arange(50) % 2, order(50, 1), order(50, 0)))
    assert not np.array_equal(order(50, 0), order(50, 1))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 17, 100])
def test_each_place_is_equally_likely(size):
    keys = np.arange(4000 * size, dtype=np.uint64)
    for index in (0, size - 1):
        counts = np.bincount(permute(np.full(len(keys), index), size, keys), minlength=size)
        chi_square = ((counts - 4000) ** 2 / 4000).sum()
        assert chi_square < size - 1 + 6 * np.sqrt(2 * size), counts


def test_neighbours_part():
    distance = np.abs(np.diff(order(10_000, 5)))
    assert abs(distance.mean() - 10_000 / 3) < 150
    assert (distance == 1).mean() < 0.002
