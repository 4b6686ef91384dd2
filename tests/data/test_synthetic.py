"""Made-up tokens: the same everywhere and in every slice, in range, with known frequencies, documents and something to learn."""

import hashlib
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import load_config
from moejax.data import open_data
from moejax.data.synthetic import DOCUMENT_TOKENS, NUM_TOKENS, SyntheticTokens
from moejax.errors import ConfigError
from tests.data.tiny import tiny_config

VOCABULARIES = (1, 2, 3, 4, 5, 7, 8, 9, 100, 100_352, 2**31)


@given(
    vocab_size=st.sampled_from(VOCABULARIES),
    start=st.integers(0, NUM_TOKENS - 300),
    cuts=st.lists(st.integers(0, 300), min_size=2, max_size=4),
)
def test_slices_agree_with_any_other_slicing(vocab_size: int, start: int, cuts: list[int]) -> None:
    tokens = SyntheticTokens(vocab_size)
    whole = tokens[start : start + 300]
    assert whole.dtype == np.int32
    assert whole.shape == (300,)
    assert whole.min() >= 0
    assert whole.max() < vocab_size
    cuts = sorted(cuts)
    for first, last in itertools.pairwise(cuts):
        assert np.array_equal(tokens[start + first : start + last], whole[first:last])


def test_slices_end_where_the_tokens_end() -> None:
    tokens = SyntheticTokens(100)
    assert len(tokens) == NUM_TOKENS
    assert np.array_equal(tokens[-5:], tokens[NUM_TOKENS - 5 : NUM_TOKENS + 5])
    assert tokens[7:7].shape == tokens[7:3].shape == (0,)


def test_the_same_tokens_on_every_machine() -> None:
    tokens = SyntheticTokens(100_352)
    digest = hashlib.sha256(tokens[0:10_000].tobytes() + tokens[NUM_TOKENS - 10_000 :].tobytes()).hexdigest()
    assert digest.startswith("02fbf809042d3b1b")


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 8, 9, 100, 1000])
def test_frequencies_are_the_known_ones(vocab_size: int) -> None:
    tokens, count = SyntheticTokens(vocab_size), 1_000_000
    share = tokens.probabilities()
    assert share.sum() == pytest.approx(1)
    found = np.bincount(tokens[5 * count : 6 * count], minlength=vocab_size) / count
    # Linked pairs make counts vary a little more than independent draws would.
    assert (abs(found - share) <= 5 * np.sqrt(share * (1 - share) * 1.5 / count)).all()


def test_words_follow_zipfs_law_in_steps() -> None:
    share = SyntheticTokens(1024).probabilities()[:-1]
    assert share.shape == (1023,)
    for octave in range(10):
        of_octave = share[2**octave - 1 : 2 ** (octave + 1) - 1]
        assert of_octave == pytest.approx(share[0] / 2**octave)
        assert of_octave.sum() == pytest.approx(share[0])


def test_the_entropy_is_what_counting_finds() -> None:
    data = open_data(tiny_config(source="synthetic", vocab_size=320))
    known = SyntheticTokens(320).unigram_entropy()
    assert data.unigram_entropy() == pytest.approx(known, abs=2e-3)
    assert known < math.log(320)


def test_documents_have_geometric_lengths_and_end_with_the_last_id() -> None:
    tokens = SyntheticTokens(1000)
    assert tokens.eos_id == 999
    lengths = np.diff(np.flatnonzero(tokens[0:2_000_000] == 999))
    assert lengths.mean() == pytest.approx(DOCUMENT_TOKENS, rel=0.06)
    assert lengths.std() == pytest.approx(DOCUMENT_TOKENS, rel=0.1)
    assert SyntheticTokens(1).eos_id is None


def test_the_document_mask_knows_the_documents() -> None:
    batch = open_data(tiny_config(source="synthetic", seq_len=4096, document_mask=True)).batch(0)
    ends = batch["tokens"] == 299
    assert ends.any()
    assert (batch["labels"][ends] == -1).all()
    assert np.array_equal(batch["segment_ids"][:, 1:], 1 + np.cumsum(ends[:, :-1], axis=1))


def test_a_model_that_knows_the_token_before_gets_below_the_unigram_entropy() -> None:
    tokens = SyntheticTokens(17)
    ids = tokens[0:1_000_000]
    pairs = np.bincount(17 * ids[:-1] + ids[1:], minlength=17 * 17).reshape(17, 17) / (len(ids) - 1)
    given_before = pairs / pairs.sum(axis=1, keepdims=True)
    conditional = -(pairs[pairs > 0] * np.log(given_before[pairs > 0])).sum()
    assert conditional < tokens.unigram_entropy() - 0.2


def test_a_batch_of_any_vocabulary_is_made_in_well_under_two_seconds() -> None:
    data = open_data(load_config("ultra_256e"))
    begin_s = time.perf_counter()
    batch = data.sequences(10**6, 512)
    assert time.perf_counter() - begin_s < 2
    assert batch["tokens"].shape == (512, 8192)
    assert data.describe().startswith("synthetic: 1,099,511,627,776 tokens, 127,506,841 training sequences of 8192 and ")


def test_the_held_out_split_is_as_for_other_sources() -> None:
    data = open_data(tiny_config(source="synthetic", seq_len=16, eval_fraction=0.25))
    assert data.num_eval_tokens == NUM_TOKENS // 4
    first, again = (next(iter(data.eval_batches(4, 4)))["tokens"] for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, data.batch(0)["tokens"])


def test_an_end_of_document_id_is_not_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"data\.eos_id=0 is for token files, but data\.source=synthetic knows its own"):
        tiny_config(source="synthetic", eos_id=0)
    assert open_data(tiny_config(source="synthetic")).tokenizer is None
