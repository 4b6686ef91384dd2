import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import token_files
from moejax.data.token_files import open_token_files
from moejax.errors import DataError

DTYPES = ["uint8", "uint16", "uint32", "uint64"]


def test_bytes_that_begin_with_magic_are_an_npy_array_whatever_the_config_says(tmp_path):
    for dtype in [*DTYPES, "int64", ">u2"]:
        np.save(tmp_path / "a.npy", np.array([1, 2, 250], dtype))
        tokens = open_token_files([str(tmp_path / "a.npy")], "uint32", 251)
        assert tokens[0:3].tolist() == [1, 2, 250]
        assert tokens[0:3].dtype == np.int32


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_without_header_are_items_of_the_config_dtype(tmp_path, dtype):
    np.array([7, 0, 255, 3], dtype).tofile(tmp_path / "a.npy")
    tokens = open_token_files([str(tmp_path / "a.npy")], dtype, 256)
    assert (len(tokens), tokens[0:4].tolist()) == (4, [7, 0, 255, 3])


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_several_files_read_as_one_row(tmp_path_factory, lengths, data):
    folder = tmp_path_factory.mktemp("row")
    row = np.arange(sum(lengths), dtype=np.uint16)
    for number, part in enumerate(np.split(row, np.cumsum(lengths)[:-1])):
        if number % 2:
            np.save(folder / f"{number}.npy", part)
        else:
            part.tofile(folder / f"{number}.npy")
    tokens = open_token_files([str(folder / f"{number}.npy") for number in range(len(lengths))], "uint16", len(row))
    start = data.draw(st.integers(0, len(row)))
    stop = data.draw(st.integers(start, len(row) + 2))
    assert len(tokens) == len(row)
    assert tokens[start:stop].tolist() == row[start:stop].tolist()


def run_fresh(code: str, *args: str) -> str:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("has_header", [True, False])
def test_gigabytes_open_at_once_and_stay_on_disk(tmp_path, has_header):
    path = tmp_path / "large.npy"
    num_tokens = 3 * 2**30
    with path.open("wb") as stream:  # a sparse file: 6 GiB that take no space
        if has_header:
            np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": False, "shape": (num_tokens,)})
        stream.truncate(stream.tell() + 2 * num_tokens)
        stream.seek(-2, 2)
        stream.write(np.uint16(77).tobytes())
    out = run_fresh(
        """
        import resource, sys, time
        from moejax.data.token_files import open_token_files
        peak_mb = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before, begin = peak_mb(), time.perf_counter()
        tokens = open_token_files([sys.argv[1]], "uint16", 100)
        last = tokens[len(tokens) - 3 : len(tokens)].tolist()
        print(len(tokens), last, time.perf_counter() - begin, peak_mb() - before)
        """,
        str(path),
    )
    found = re.fullmatch(r"(\d+) (\[.*\]) (\S+) (\S+)", out.strip())
    assert found
    assert int(found[1]) == num_tokens
    assert found[2] == "[0, 0, 77]"
    assert float(found[3]) < 2
    assert float(found[4]) < 100


def test_more_files_than_a_process_may_hold_open(tmp_path):
    for number in range(700):
        np.array([number], np.uint16).tofile(tmp_path / f"{number:04d}.npy")
    out = run_fresh(
        """
        import pathlib, resource, sys
        from moejax.data.token_files import open_token_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
        tokens = open_token_files(sorted(map(str, pathlib.Path(sys.argv[1]).iterdir())), "uint16", 700)
        print(tokens[0:700].sum(), tokens[0:3].tolist())
        """,
        str(tmp_path),
    )
    assert out.strip() == f"{sum(range(700))} [0, 1, 2]"


def test_of_many_tokens_blocks_are_checked_when_opened_and_all_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_BLOCK", 10)
    monkeypatch.setattr(token_files, "_CHECKED_AT_OPEN", 100)
    ids = np.zeros(1000, np.uint16)
    np.save(tmp_path / "good.npy", ids)
    paths = [str(tmp_path / "good.npy"), str(tmp_path / "bad.npy")]

    def open_with_wrong_id_at(position: int):
        bad = ids.copy()
        bad[position] = 50
        np.save(paths[1], bad)
        return open_token_files(paths, "uint16", 50)

    for position in (0, 9, 200, 205, 990, 999):  # 2000 tokens, so every 20th block of each file and its last one
        with pytest.raises(DataError, match=rf"bad\.npy holds id 50 at token {position} "):
            open_with_wrong_id_at(position)
    tokens = open_with_wrong_id_at(555)
    assert tokens[0:1555].tolist() == [0] * 1555
    with pytest.raises(DataError, match=r"data\.paths\[1\]=\S*bad\.npy holds id 50 at token 555 \(read as uint16\)"):
        tokens[1500:1600]


def test_opening_again_sees_a_file_that_was_replaced(tmp_path):
    path = tmp_path / "a.npy"
    for value in (1, 2):
        np.full(4, value, np.uint16).tofile(tmp_path / "new.npy")
        (tmp_path / "new.npy").rename(path)
        assert open_token_files([str(path)], "uint16", 5)[0:4].tolist() == [value] * 4
