"""Records: numbers that come back exactly, nulls for what is not finite, and files cut back to the step a run resumes from."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.metrics import as_line, drop_after, lists, memory, read_records, scalars


def test_scalars_are_short_and_come_back_to_the_bit():
    value = np.float32(1) / np.float32(3)
    found = scalars({"train/loss": value, "count": np.int32(7), "moe/expert_load": np.ones((2, 2))})
    assert found == {"train/loss": 0.33333334, "count": 7}
    assert np.float32(found["train/loss"]) == value


def test_scalars_that_are_not_finite_are_null_and_the_line_stays_valid_json():
    text = as_line(scalars({"a": np.float32("nan"), "b": np.float32("inf"), "c": np.float32(1e30)}))
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": None, "c": 1e30}


def test_low_precision_scalars_are_numbers():
    assert scalars({"x": np.asarray(jnp.bfloat16(1.5))}) == {"x": 1.5}


def test_lists_keep_the_shape():
    assert lists({"moe/expert_load": np.float32([[0.25, 0.75]]), "train/loss": np.float32(1)}) == {"moe/expert_load": [[0.25, 0.75]]}


def test_memory_counts_this_process():
    assert 10 * 2**20 < memory()["memory/host_bytes"] < 2**45


def test_records_after_the_step_are_dropped_with_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = [
        {"kind": "start", "step": 0},
        {"kind": "train", "step": 1},
        {"kind": "train", "step": 2},
        {"kind": "save", "step": 2},
        {"kind": "eval", "step": 2},
    ]
    dropped = [{"kind": "start", "step": 2}, {"kind": "train", "step": 3}]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept + dropped) + '{"kind": "tra')
    assert read_records(path) == kept + dropped
    drop_after(path, 2)
    assert read_records(path) == kept
    drop_after(path, 0)
    assert read_records(path) == []


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b"", b"[]", b"3", b'{"kind": "train"}', b'{"kind": "train", "step": "2"}', b'{"step": 2}']
)
def test_a_damaged_line_is_skipped_and_dropped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    kept = [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}]
    first, second = (as_line(record).encode() for record in kept)
    path.write_bytes(first + line + b"\n" + second)
    assert read_records(path) == kept
    drop_after(path, 2)
    assert path.read_bytes() == first + second


def test_a_file_that_does_not_exist_has_no_records(tmp_path):
    assert read_records(tmp_path / "metrics.jsonl") == []
    drop_after(tmp_path / "metrics.jsonl", 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
