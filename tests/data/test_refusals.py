"""Bad data is refused when it is opened, in one sentence: setting, value, rule, way out."""

import re

import numpy as np
import pytest

from moejax.config import DataConfig
from moejax.data import open_data
from moejax.errors import ConfigError, DataError
from tests.data.tiny import files_config, tiny_config


def refusal(config) -> str:
    with pytest.raises(DataError) as caught:
        open_data(config)
    return str(caught.value)


def headerless(path, content: bytes, **settings):
    path.write_bytes(content)
    return tiny_config(source="files", paths=(str(path),), seq_len=4, **settings)


def test_missing_file(tmp_path):
    path = tmp_path / "nowhere.npy"
    assert refusal(tiny_config(source="files", paths=(str(path),))) == f"data.paths[0]={path} does not exist; correct the path"


def test_folder(tmp_path):
    assert refusal(tiny_config(source="files", paths=(str(tmp_path),))) == f"data.paths[0]={tmp_path} is a folder; name the files in it"


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("", "is an empty path; name a token file or leave it out"),
        ("~nouser/x", "begins with the home of a user that does not exist here; write the whole path"),
        ("x" * 300, "cannot be read (File name too long); make it readable, correct the path or leave it out"),
    ],
    ids=["empty", "unknown user", "too long"],
)
def test_path_that_cannot_be_one(path, rest):
    assert refusal(tiny_config(source="files", paths=(path,))) == f"data.paths[0]={path} {rest}"


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.bin"])
def test_zip_archive(tmp_path, name):
    with (tmp_path / name).open("wb") as stream:
        np.savez(stream, ids=np.zeros(100, np.uint16))
    assert refusal(tiny_config(source="files", paths=(str(tmp_path / name),))) == (
        f"data.paths[0]={tmp_path / name} is a .npz or another zip archive; write each array in it to a file of its own with numpy.save"
    )


def test_empty_file(tmp_path):
    path = tmp_path / "a.npy"
    assert refusal(headerless(path, b"")) == f"data.paths[0]={path} is empty (0 bytes); leave it out or write it again"


def test_array_of_no_tokens(tmp_path):
    assert "is an array of 0 tokens; leave it out" in refusal(files_config(tmp_path, np.zeros(0, np.uint16)))


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((2, 3), np.uint16), "is a uint16 array of shape (2, 3); token files hold one row of integers"),
        (np.zeros(6, np.float32), "is a float32 array of shape (6,)"),
        (np.array(6, np.int32), "is a int32 array of shape ()"),
        (np.zeros(6, bool), "is a bool array of shape (6,)"),
    ],
)
def test_npy_array_that_is_no_row_of_integers(tmp_path, array, what):
    message = refusal(files_config(tmp_path, array))
    assert message.startswith(f"data.paths[0]={tmp_path}/part0.npy ")
    assert what in message
    assert "save ids.reshape(-1) with an integer type" in message


def test_npy_array_of_objects(tmp_path):
    assert "begins like a .npy array but cannot be mapped" in refusal(files_config(tmp_path, np.array([None, 1])))


@pytest.mark.parametrize("kept", [6, 20, 100, 140])
def test_npy_file_cut_short(tmp_path, kept):
    config = files_config(tmp_path, np.zeros(100, np.uint16))
    path = tmp_path / "part0.npy"
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(config)
    assert message.startswith(f"data.paths[0]={path} begins like a .npy array but cannot be mapped")
    assert "write it again with numpy.save" in message


def test_npy_file_with_more_behind_its_array(tmp_path):
    config = files_config(tmp_path, np.zeros(100, np.uint16))
    with (tmp_path / "part0.npy").open("ab") as stream:
        np.save(stream, np.zeros(10, np.uint16))
    assert re.search(r"part0\.npy has 148 bytes behind its array of 100 tokens; write one array per file", refusal(config))


def test_headerless_size_that_is_no_multiple_of_the_item(tmp_path):
    message = refusal(headerless(tmp_path / "a.npy", bytes(401), token_dtype="uint32"))
    assert "has no .npy header and 401 bytes, not a multiple of the 4 of data.token_dtype=uint32; set data.token_dtype" in message


def test_unreadable_file(tmp_path, monkeypatch):
    config = headerless(tmp_path / "a.npy", bytes(400))

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert "a.npy cannot be read (Permission denied); make it readable" in refusal(config)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int32"])
def test_id_outside_the_vocabulary(tmp_path, dtype):
    ids = np.zeros(500, dtype)
    ids[321] = 100
    assert refusal(files_config(tmp_path, np.zeros(5, dtype), ids, vocab_size=100)) == (
        f"data.paths[1]={tmp_path}/part1.npy holds id 100 at token 321 (read as {dtype}), but model.vocab_size=100 allows 0..99; "
        "raise model.vocab_size, or write the file again with other ids"
    )
    ids[321] = 99
    open_data(files_config(tmp_path, ids, vocab_size=100, seq_len=8))


def test_id_outside_the_vocabulary_of_a_headerless_file(tmp_path):
    path = tmp_path / "a.npy"
    assert refusal(headerless(path, np.arange(0, 400, 4, np.uint16).tobytes())) == (
        f"data.paths[0]={path} holds id 300 at token 75 (read as uint16), but model.vocab_size=300 allows 0..299; "
        "raise model.vocab_size, or set data.token_dtype to the type the file was written with"
    )


def test_negative_and_huge_ids(tmp_path):
    assert "holds id -1 at token 2" in refusal(files_config(tmp_path, np.array([0, 1, -1])))
    assert f"holds id {2**64 - 1} at token 1" in refusal(files_config(tmp_path, np.array([0, 2**64 - 1], np.uint64)))


def test_too_few_training_tokens(tmp_path):
    assert refusal(files_config(tmp_path, np.zeros(20, np.uint16), seq_len=12, eval_fraction=0.9)) == (
        "data.seq_len=12 needs 13 tokens for one sequence, but 2 of 20 are for training with data.eval_fraction=0.9; "
        "shorten data.seq_len, give more tokens or lower data.eval_fraction"
    )
    ids = np.zeros(13, np.uint16)
    assert open_data(files_config(tmp_path, ids, seq_len=12, eval_fraction=0.0)).num_train_sequences == 1


def test_too_few_held_out_tokens(tmp_path):
    assert refusal(files_config(tmp_path, np.zeros(200, np.uint16), seq_len=12, eval_fraction=0.05)) == (
        "data.eval_fraction=0.05 holds out 10 of 200 tokens, but one sequence of data.seq_len=12 needs 13; shorten data.seq_len, give more "
        "tokens, raise data.eval_fraction, or set data.eval_fraction=0 and eval.every=None"
    )


def test_nothing_held_out_to_evaluate_on(tmp_path):
    data = open_data(files_config(tmp_path, np.zeros(100, np.uint16), seq_len=4, eval_fraction=0.0))
    with pytest.raises(DataError, match=r"data\.eval_fraction=0 holds nothing out"):
        next(data.eval_batches(2))


def test_end_of_document_outside_the_vocabulary(tmp_path):
    assert "data.eos_id=300 is not an id below model.vocab_size=300" in refusal(
        files_config(tmp_path, np.zeros(100, np.uint16), eos_id=300)
    )


def test_end_of_document_of_the_shipped_text_cannot_be_changed():
    with pytest.raises(ConfigError, match=r"data\.eos_id=0 is for token files"):
        DataConfig(eos_id=0)


def test_negative_step():
    with pytest.raises(ValueError, match="is negative"):
        open_data(tiny_config()).batch(-1)
