"""The command `moejax checkpoint` on a small run."""

import json
import os

import numpy as np
import pytest

from moejax.checkpoint import committed_steps, read_manifest
from moejax.checkpoint.inspect import read_arrays
from moejax.cli.main import main
from moejax.config import to_dict
from tests.oracle.examples import model_config, parameters, train_config
from tests.train.saved_run import save_run

CONFIG = train_config(model_config())
MASTERS = {step: parameters(CONFIG.model, seed=step) for step in (10, 20, 30)}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "run", CONFIG, MASTERS)


def answer(capsys, *words) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_inspect_shows_arrays_by_branch(run, capsys):
    code, text = answer(capsys, "inspect", run)
    assert code == 0
    assert "checkpoints/30" in text
    numbers = sum(leaf.size for leaf in (MASTERS[30]["embed"]["w_embed"],))
    assert f"master.embed{'':>7}{numbers:>22,} numbers" in text or f"{numbers:,} numbers" in text
    code, text = answer(capsys, "inspect", f"{run}@10", "--json")
    assert json.loads(text)["step"] == 10


def test_verify_names_everything_that_is_broken(run, capsys):
    assert answer(capsys, "verify", run) == (0, f"checkpoint {run}/checkpoints/30 is as it was written\n")
    arrays = run / "checkpoints" / "30" / "arrays"
    large = sorted((path for path in arrays.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    large[-1].write_bytes(large[-1].read_bytes()[:-1])
    large[0].unlink()
    (arrays / "more").write_text("x")
    code, text = answer(capsys, "verify", run)
    assert code == 1
    for words in ("is missing", "bytes instead of", "file arrays/more was not written with the others", "is broken: 3 problems"):
        assert words in text
    (run / "checkpoints" / "20" / "MANIFEST.json").unlink()
    code, text = answer(capsys, "verify", f"{run}@20")
    assert code == 1
    assert "MANIFEST.json is missing or not readable" in text


def test_diff_lists_what_differs_with_sizes(run, tmp_path, capsys):
    assert answer(capsys, "diff", run, f"{run}@30")[0] == 0
    code, text = answer(capsys, "diff", f"{run}@10", run)
    assert code == 1
    gap = np.abs(MASTERS[10]["head"]["w_head"] - MASTERS[30]["head"]["w_head"]).max()
    assert f"master.head.w_head: by up to {gap:.3g}" in text
    other = train_config(model_config(tie_embeddings=True, vocab_size=44))
    tied = save_run(tmp_path / "tied", other, {10: parameters(other.model)})
    code, text = answer(capsys, "diff", f"{run}@10", tied)
    assert code == 1
    assert f"arrays of {run}@10 alone:\n  master.head.w_head" in text
    assert "master.embed.w_embed: float32[40, 16] -> float32[44, 16]" in text


def test_prune_keeps_the_newest_and_every_so_many(run, capsys):
    code, text = answer(capsys, "prune", run, "--keep", "1", "--keep-every", "20", "--dry-run")
    assert (code, committed_steps(run / "checkpoints")) == (0, [10, 20, 30])
    assert "1 of 3 checkpoints would go; there stay 20, 30" in text
    assert answer(capsys, "prune", run, "--keep", "1", "--keep-every", "20")[0] == 0
    assert committed_steps(run / "checkpoints") == [20, 30]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["20", "30"]


@pytest.mark.parametrize(("words", "weights"), [((), (1 / 3, 1 / 3, 1 / 3)), (("--decay", "0.5"), (1 / 7, 2 / 7, 4 / 7))])
def test_an_average_can_be_evaluated_and_says_what_it_is_of(run, tmp_path, capsys, words, weights):
    out = tmp_path / "mean"
    code, text = answer(capsys, "average", f"{run}@10", f"{run}@20", run, "--out", out, *words)
    assert code == 0, text
    (arrays,) = [array for _, array in read_arrays(out / "checkpoints", 30, ["master.head.w_head"])]
    expected = sum(w * MASTERS[step]["head"]["w_head"].astype(np.float64) for w, step in zip(weights, (10, 20, 30), strict=True))
    np.testing.assert_allclose(arrays, expected, rtol=1e-6, atol=1e-7)
    assert read_manifest(out / "checkpoints", 30)["average"]["weights"] == pytest.approx(weights)
    assert to_dict(CONFIG) == json.loads((out / "config.json").read_text())
    assert answer(capsys, "average", run, f"{run}@10", "--out", out)[1].endswith("name a new run directory\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what to do is missing; write inspect, verify, diff, prune, average"),
        (["reshard", "x"], "reshard is nothing that can be done with a checkpoint"),
        (["diff", "RUN"], "takes 2 checkpoints, not 1"),
        (["average", "RUN", "--out", "x"], "takes 2 checkpoints or more, not 1"),
        (["average", "RUN", "RUN"], "out is not given"),
        (["average", "RUN", "RUN", "--out", "x", "--decay", "2"], "decay=2.0 is not in (0, 1]"),
        (["prune", "RUN"], "keep is not given"),
        (["prune", "RUN@10", "--keep", "1"], "prune takes a whole run"),
        (["prune", "RUN", "--keep", "0"], "keep=0"),
        (["inspect", "RUN@x"], "does not end in a step; write it as"),
        (["inspect", "RUN", "--deepth", "3"], "depth"),
    ],
)
def test_wrong_words_end_with_2(run, words, message, capsys):
    code, text = answer(capsys, *[word.replace("RUN", str(run)) for word in words])
    assert code == 2
    assert message in text


def test_a_step_that_is_not_there_ends_with_1(run, capsys):
    code, text = answer(capsys, "inspect", f"{run}@11")
    assert code == 1
    assert "found: 10, 20, 30" in text


def test_help(capsys):
    assert "moejax checkpoint diff quickstart@200" in answer(capsys, "--help")[1]
