import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from moejax.data import Dataset, open_data
from tests.data.tiny import files_config, tiny_config

NAMES = ("tokens", "labels", "segment_ids", "positions")


def count_up(folder, num_tokens: int = 500, **settings) -> Dataset:
    """A dataset whose token ids are their positions, in three files."""
    parts = np.split(np.arange(num_tokens, dtype=np.uint32), [num_tokens // 7, num_tokens // 2])
    return open_data(files_config(folder, *parts, vocab_size=num_tokens, **{"seq_len": 8, "eval_fraction": 0.1} | settings))


def digest(data: Dataset) -> str:
    blocks = [data.batch(step)[name].tobytes() for step in (0, 3, 10**6) for name in NAMES]
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order(tmp_path):
    data = count_up(tmp_path, batch_size=5)
    size = data.num_train_sequences
    assert (data.num_train_tokens, size) == (450, 56)
    first = data.sequences(0, size)["tokens"][:, 0]
    second = data.sequences(size, size)["tokens"][:, 0]
    for epoch in (first, second):
        assert sorted(epoch) == [8 * i for i in range(size)]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.sort(first))


def test_every_training_token_but_the_first_is_a_label_once(tmp_path):
    data = count_up(tmp_path)
    labels = data.sequences(0, data.num_train_sequences)["labels"]
    assert sorted(labels.ravel()) == list(range(1, 449))


def test_labels_are_the_next_tokens_across_files(tmp_path):
    data = count_up(tmp_path)
    for step in range(20):
        batch = data.batch(step)
        assert all(batch[name].shape == (4, 8) and batch[name].dtype == np.int32 for name in NAMES)
        assert np.array_equal(batch["labels"], batch["tokens"] + 1)
        assert np.array_equal(batch["tokens"], batch["tokens"][:, :1] + np.arange(8))


def test_a_sequence_depends_on_its_number_not_on_the_batch_size():
    small, large = open_data(tiny_config(batch_size=4)), open_data(tiny_config(batch_size=8))
    for step in (0, 7, 10_000):
        halves = [small.batch(2 * step + half) for half in (0, 1)]
        for name in NAMES:
            assert np.array_equal(large.batch(step)[name], np.concatenate([half[name] for half in halves]))


def test_a_batch_does_not_depend_on_what_was_read_before(tmp_path):
    data = count_up(tmp_path)
    expected = [digest(data), data.batch(5)["tokens"].tolist()]
    fresh = count_up(tmp_path)
    assert [fresh.batch(5)["tokens"].tolist(), digest(fresh)] == expected[::-1]


def test_p59_resuming_with_another_number_of_processes_sees_the_same_sequences():
    data = open_data(tiny_config(batch_size=8))

    def run(first_step: int, stop: int, num_processes: int) -> list[np.ndarray]:
        """Tokens of each step, each process reading its own rows."""
        share = 8 // num_processes
        steps = []
        for step in range(first_step, stop):
            parts = [data.sequences(8 * step + rank * share, share)["tokens"] for rank in range(num_processes)]
            steps.append(np.concatenate(parts))
        return steps

    uninterrupted = [data.batch(step)["tokens"] for step in range(6)]
    assert np.array_equal(run(0, 3, 4) + run(3, 6, 2), uninterrupted)


def test_other_processes_get_the_same_batches():
    code = (
        "from moejax.data import open_data; from tests.data.tiny import tiny_config; from tests.data.test_dataset import digest; "
        "print(digest(open_data(tiny_config(seed=3, document_mask=True))))"
    )
    expected = digest(open_data(tiny_config(seed=3, document_mask=True)))
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment).stdout
    assert out.strip() == expected


def test_the_seed_changes_the_order_only(tmp_path):
    orders = [count_up(tmp_path, seed=seed).sequences(0, 56)["tokens"][:, 0] for seed in (0, 1, 2**30 + 5, 2**31 - 1)]
    for one, other in itertools.combinations(orders, 2):
        assert not np.array_equal(one, other)
        assert sorted(one) == sorted(other)


def test_no_training_window_touches_the_held_out_split(tmp_path):
    data = count_up(tmp_path)
    train = data.sequences(0, data.num_train_sequences)
    held_out = np.concatenate([np.stack([batch["tokens"], batch["labels"]]) for batch in data.eval_batches(1)])
    assert max(train["tokens"].max(), train["labels"].max()) < data.num_train_tokens == 450
    assert held_out.min() == 450
    assert data.num_eval_tokens == 50


def test_evaluation_shows_every_held_out_window_once_and_fills_the_last_batch_up(tmp_path):
    data = count_up(tmp_path)
    batches = list(data.eval_batches(4))
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert tokens.shape == (8, 8)
    assert data.num_eval_sequences == 6
    assert sorted(tokens[:6, 0]) == [450 + 8 * i for i in range(6)]
    assert np.array_equal(labels[:6], tokens[:6] + 1)
    assert (labels[6:] == -1).all()
    assert [batch["segment_ids"].min(axis=1).tolist() for batch in batches] == [[1] * 4, [1, 1, 0, 0]]


def test_evaluation_is_the_same_for_every_seed_and_batch_size(tmp_path):
    def rows(seed: int, batch_size: int, most: int) -> list:
        batches = list(count_up(tmp_path, seed=seed).eval_batches(batch_size, max_sequences=most))
        tokens = np.concatenate([batch["tokens"] for batch in batches])
        return tokens[np.concatenate([batch["labels"] for batch in batches])[:, 0] >= 0].tolist()

    assert rows(0, 2, 5) == rows(1, 4, 5) == rows(2, 5, 100)[:5]
    assert len(rows(0, 4, 100)) == 6


def test_a_part_of_the_evaluation_is_a_sample_of_the_whole_split():
    data = open_data(tiny_config())
    tokens = np.asarray(data.source.tokens[data.num_train_tokens :])
    part = np.concatenate([batch["tokens"] for batch in data.eval_batches(64, max_sequences=256)])
    starts = [tokens.tobytes().find(row.astype(np.uint16).tobytes()) / 2 / len(tokens) for row in part]
    assert abs(np.mean(starts) - 0.5) < 0.1
    assert np.std(starts) > 0.2


def test_document_masks_come_from_the_end_of_document_id(tmp_path):
    ids = np.tile(np.array([3, 4, 0], np.uint16), 100)
    settings = {"seq_len": 6, "eval_fraction": 0.1, "eos_id": 0, "batch_size": 2}
    masked = open_data(files_config(tmp_path, ids, document_mask=True, **settings)).batch(0)
    plain = open_data(files_config(tmp_path, ids, document_mask=False, **settings)).batch(0)
    assert masked["tokens"].tolist() == plain["tokens"].tolist() == [[3, 4, 0, 3, 4, 0]] * 2
    assert masked["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2]] * 2
    assert masked["labels"].tolist() == [[4, 0, -1, 4, 0, -1]] * 2
    assert masked["positions"].tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert plain["segment_ids"].tolist() == [[1] * 6] * 2
    assert plain["labels"].tolist() == [[4, 0, 3, 4, 0, 3]] * 2


def test_shipped_plays_are_separate_documents_under_a_mask():
    data = open_data(tiny_config(document_mask=True, seq_len=2048))
    epoch = data.sequences(0, data.num_train_sequences)
    is_end = epoch["tokens"] == 256
    assert is_end.sum() == 33
    assert np.array_equal(epoch["labels"] == -1, is_end)
    assert np.array_equal(epoch["segment_ids"][:, -1], 1 + is_end[:, :-1].sum(axis=1))


def test_unigram_entropy_is_that_of_the_training_tokens(tmp_path):
    ids = np.concatenate([np.tile(np.array([1, 2, 2, 2], np.uint16), 225), np.full(100, 5, np.uint16)])
    entropy = open_data(files_config(tmp_path, ids, seq_len=4, eval_fraction=0.1)).unigram_entropy()
    assert entropy == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))
    assert 3.2 < open_data(tiny_config()).unigram_entropy() < 3.5


def test_description_names_source_and_sizes(tmp_path):
    assert count_up(tmp_path).describe() == "3 token file(s): 500 tokens, 56 training sequences of 8 and 6 held out"
    assert open_data(tiny_config()).describe().startswith("shakespeare (36 plays): 4,748,117 tokens, ")


def test_the_package_needs_numpy_only():
    code = "import sys, moejax.data; print([name for name in ('jax', 'flax', 'grain', 'orbax') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_tokenizer_is_known_for_text_only(tmp_path):
    data = open_data(tiny_config())
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.batch(0)["tokens"][0]).isascii()
    assert count_up(tmp_path).tokenizer is None
