"""The command `moejax verify`, and the tool that goes through every case, on one or two cases."""

import json
import os
import sys
from unittest import mock

import pytest

from moejax import verify
from moejax.cli.main import main
from moejax.verify import Case
from tests.verify.test_faults import divided
from tools import matrix

TWO = [Case(ep=2, grouped_matmul="cpu"), Case(grouped_matmul="cpu")]
MINE = """
\"\"\"A config with a router of its own.\"\"\"
import jax.numpy as jnp
import moejax.nn.moe
from moejax.config import load_config
from moejax.nn.moe import Router

class Cosine(Router):
    def __call__(self, x, tokens, bias, layer):
        return super().__call__(x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6), tokens, bias, layer)

moejax.nn.moe.Router = Cosine

def config():
    return load_config("tiny_cpu")
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_a_healthy_config_with_its_own_router_ends_with_0(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "covering_cases", lambda cases: TWO)
    monkeypatch.setattr("moejax.nn.moe.Router", sys.modules["moejax.nn.moe"].Router)  # the config file replaces it
    (tmp_path / "mine.py").write_text(MINE)
    out = tmp_path / "cases.json"
    assert main(["verify", str(tmp_path / "mine.py"), "--json", str(out), "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert "tiny_cpu as " in text
    assert "2 of 2 cases are equal to the reference" in text
    records = json.loads(out.read_text())
    assert [record["ep"] for record in records] == [2, 1]
    assert all(record["errors"]["gradient"] < 2e-5 and record["errors"]["differences"] == [] for record in records)


@pytest.mark.slow
def test_a_sabotaged_config_ends_with_1(monkeypatch, capsys):
    from moejax.parallel import zero

    monkeypatch.setattr(verify, "covering_cases", lambda cases: TWO)
    with mock.patch("moejax.train.step.zero", mock.Mock(wraps=zero, reduce_gradients=divided)):
        assert main(["verify", "tiny_cpu"]) == 1
    assert "divided once too often" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a config is missing; write it as in moejax verify quickstart"),
        (["quickstart", "--json", "nowhere/x.json"], "is to be in a directory that does not exist"),
        (["quickstart", "--alll"], "alll"),
        (["quikstart"], "quickstart"),
    ],
)
def test_wrong_words_end_with_2(words, message, capsys):
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_matrix_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "matrix.jsonl"
    words = ["matrix.py", "tiny_cpu", "--pp", "1", "--dp", "1", "--ep", "1", "2", "--microbatches", "1", "--weights", "resident"]
    words += ["--recompute", "none", "--grouped-matmul", "cpu", "--transport", "auto", "gather", "--out", str(out), "--", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert matrix.main() == 0
    assert "2 of 2 cases are equal to the reference; by setting:" in capsys.readouterr().out
    out.write_text(out.read_text() + '{"cut off')
    with mock.patch("moejax.verify.Verifier.run", return_value=[]):
        assert matrix.main() == 0
    text = capsys.readouterr().out
    assert "2 of them are in" in text
    assert "ep              1: 1/1  2: 1/1" in text


@pytest.mark.parametrize(("words", "message"), [(["--shard", "3/2"], "is not I/N"), (["--pp", "3"], "leave some of them out")])
def test_the_matrix_refuses_what_there_is_not(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["matrix.py", "tiny_cpu", *words])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
