"""Whole runs on made-up tokens, as people type them."""

from pathlib import Path

import pytest

from moejax.cli.main import main
from moejax.config import SYSTEM_REFERENCE, load_config
from moejax.data import open_data
from moejax.train.metrics import read_records

SHRUNK = (
    "--mesh.ep 1 --model.vocab-size 512 --model.embed-dim 64 --model.num-layers 2 --model.mlp-dim 64 --model.attention.num-heads 2 "
    "--model.attention.num-kv-heads 1 --model.attention.head-dim 16 --model.moe.num-experts 8 --model.moe.expert-dim 32 "
    "--model.moe.shared-expert-dim 32 --model.dtype float32 --data.seq-len 32 --batch-size 4 --microbatches 1 --steps 5 "
    "--optim.lr 3e-3 --optim.schedule.warmup-steps 1 --log.every 1"
)


def losses(run_dir: Path) -> list[float]:
    return [record["train/loss"] for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "train"]


def test_a_shrunk_reference_config_trains_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "eight_layers", *SHRUNK.split()]) == 0
    out = capsys.readouterr().out
    assert "data       synthetic: 1,099,511,627,776 tokens" in out
    assert f"warning    {SYSTEM_REFERENCE}" in out
    assert "moejax generate" not in out, "there is no text to continue"
    first, *_, last = losses(tmp_path / "runs" / "eight_layers")
    assert last < first
    assert main(["generate", "eight_layers", "--prompt", "a"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == f"warning: {SYSTEM_REFERENCE}"
    assert error.startswith("error: data.source=synthetic gives token ids without a tokenizer, so a text prompt cannot be read; ")


@pytest.mark.slow
def test_any_config_trains_on_made_up_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tiny_cpu", "--data.source", "synthetic", "--steps", "5"]
    assert main(["train", *words]) == 0
    first, *_, last = losses(tmp_path / "runs" / "tiny_cpu")
    assert last < first
    start = next(record for record in read_records(tmp_path / "runs" / "tiny_cpu" / "metrics.jsonl") if record["kind"] == "start")
    assert start["unigram_entropy"] == pytest.approx(
        open_data(load_config("tiny_cpu", words[1:])).source.tokens.unigram_entropy(), abs=2e-3
    )
