"""Random numbers by hash: their distribution, and that nothing but their words decides them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.config import MeshConfig
from moejax.ops import hashing
from moejax.ops.hashing import hash_words, truncated_normal, uniform
from moejax.parallel import make_mesh

SHAPE = (256, 1024)


@pytest.fixture(scope="module")
def words():
    """Hashes of (7, i, j), int64 [256, 1024]."""
    return np.asarray(jax.jit(lambda: hash_words([7, jnp.arange(SHAPE[0])[:, None], jnp.arange(SHAPE[1])[None, :]]))(), np.int64)


@pytest.fixture(scope="module")
def normals():
    """Three draws of [256, 1024]: two seeds, and another name."""
    draw = jax.jit(lambda seed, name: truncated_normal([seed, name], SHAPE))
    return [np.asarray(draw(jnp.uint32(seed), jnp.uint32(name)), np.float64) for seed, name in ((0, 1), (1, 1), (0, 2))]


def deviation(counts):
    """How many standard deviations a chi-square statistic of equally likely cells lies from its mean."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    return (statistic - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


def test_every_byte_of_the_hash_is_uniform(words):
    for shift in (0, 8, 16, 24):
        assert abs(deviation(np.bincount((words >> shift & 255).ravel(), minlength=256))) < 5


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_are_independent(words, axis):
    top = words >> 28
    before, after = np.delete(top, -1, axis), np.delete(top, 0, axis)
    assert abs(deviation(np.bincount((16 * before + after).ravel(), minlength=256))) < 5


def test_each_bit_of_a_word_flips_half_of_the_hash():
    base = hash_words([3, jnp.zeros(32, jnp.uint32), 5])
    for place in range(3):
        parts = [3, jnp.zeros(32, jnp.uint32), 5]
        parts[place] = jnp.uint32([3, 0, 5][place]) ^ (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32))
        flipped = np.asarray(base ^ hash_words(parts))
        counts = np.array([int(value).bit_count() for value in flipped])
        assert 14 < counts.mean() < 18
        assert counts.min() >= 5


def test_hashes_collide_no_more_often_than_random_words(words):
    collisions = words.size - np.unique(words).size
    assert collisions <= 8 + 2 * words.size**2 / 2**33


def test_no_two_of_half_a_million_rows_are_alike():
    """A state of 32 bits would make about 2^38 / 2^33 = 32 pairs of rows equal in all their columns."""
    expert, row = jnp.arange(2**10)[:, None], jnp.arange(2**9, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B1)
    columns = np.stack(jax.jit(lambda: [hash_words([7, expert, row, column]) for column in (0, 1)])()).astype(np.uint64)
    assert np.unique(columns[0] << np.uint64(32) | columns[1]).size == 2**19


def test_order_and_number_of_words_matter():
    values = {int(hash_words(parts)) for parts in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [1, 0], [0, 1])}
    assert len(values) == 7


def test_words_beyond_32_bits_wrap():
    assert int(hash_words([2**40 + 9, -1])) == int(hash_words([9, 2**32 - 1]))


def test_uniform_numbers_have_the_moments_of_a_uniform_distribution():
    u = np.asarray(uniform([jnp.arange(2**18)]), np.float64)
    for power in (1, 2, 3, 4):
        spread = math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / u.size)
        assert abs((u**power).mean() - 1 / (power + 1)) < 5 * spread


@pytest.mark.parametrize("word", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFF00, 0xFFFFFFFF])
def test_uniform_numbers_never_reach_their_ends(monkeypatch, word):
    monkeypatch.setattr(hashing, "hash_words", lambda words: jnp.uint32(word))
    u = float(uniform([0]))
    assert 0 < u < 1
    assert u == pytest.approx((word + 0.5) / 2**32, abs=2**-23)


def test_normal_numbers_are_cut_at_three_deviations(normals):
    x = normals[0]
    assert 2.99 < np.abs(x).max() <= 3.0
    # Mean 0, and the variance of a normal cut there: 1 - 6 phi(3) / (Phi(3) - Phi(-3)).
    variance = 1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    assert abs(x.mean()) < 5 / math.sqrt(x.size)
    assert x.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / x.size))
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / x.size)


def test_normal_numbers_follow_the_normal_curve(normals):
    edges = np.linspace(-3, 3, 41)
    mass = np.diff([math.erf(edge / math.sqrt(2)) for edge in edges])
    expected = mass / mass.sum() * normals[0].size
    counts, _ = np.histogram(normals[0], edges)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - 39) < 5 * math.sqrt(2 * 39)


def test_rows_columns_seeds_and_names_are_unrelated(normals):
    first = normals[0]
    for values in (first, first.T):
        assert np.unique(values, axis=0).shape == values.shape
        correlation = np.corrcoef(values[:64])
        assert np.abs(correlation - np.eye(64)).max() < 6 / math.sqrt(values.shape[1])
    for other in normals[1:]:
        assert (first != other).mean() > 0.999
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(first.size)


@pytest.mark.parametrize("spec", [("dp",), (None, "ep"), (("dp", "ep"),), ("ep", "dp")])
def test_a_sharded_draw_has_the_same_bits(normals, spec):
    mesh = make_mesh(MeshConfig(dp=2, ep=4))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    x = jax.jit(lambda: truncated_normal([0, 1], SHAPE), out_shardings=sharding)()
    assert x.sharding == sharding
    np.testing.assert_array_equal(np.asarray(x, np.float64), normals[0])
