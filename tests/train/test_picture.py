"""The picture of a run is drawn whatever the run had: experts or none, gaps, one step, drops."""

import json
import struct

import numpy as np
import pytest

from moejax.train.picture import draw_run

START = {
    "kind": "start",
    "step": 0,
    "parameters": 2e6,
    "active_parameters": 1e6,
    "devices": 8,
    "device_kind": "cpu",
    "mesh": {"pp": 1, "dp": 2, "ep": 4},
}


def _train(step: int, *, is_sparse: bool, drop: float = 0.0, loss: float | None = 3.0) -> dict:
    record = {
        "kind": "train",
        "step": step,
        "tokens_seen": 100 * step,
        "train/loss": loss,
        "optim/grad_norm": loss,
        "optim/lr": 1e-3,
        "optim/skipped": 0.0,
    }
    if is_sparse:
        record |= {"moe/max_load": 1.5, "moe/rank_max_load": 1.1, "moe/drop_fraction": drop, "moe/balance_loss": 1.0}
    if step % 2 == 1:
        record |= {"speed/step_s": 0.1, "speed/tokens_per_s": 1e4, "speed/mfu": None if drop else 0.4}
        record |= {"moe/expert_load": np.full((3, 64), 1 / 64).tolist()} if is_sparse else {}
    return record


def _size(path) -> tuple[int, int]:
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.mark.parametrize(
    ("records", "height"),
    [
        ([_train(step, is_sparse=True) for step in range(1, 8)], 975),
        ([*(_train(step, is_sparse=True, drop=0.1) for step in range(1, 8)), {"kind": "eval", "step": 7, "eval/loss": 2.5}], 975),
        ([_train(1, is_sparse=False), _train(2, is_sparse=False, loss=None) | {"optim/skipped": 1.0}], 520),
        ([_train(1, is_sparse=True, loss=None)], 975),
    ],
    ids=["sparse", "with drops", "dense with a gap", "one step, not finite"],
)
@pytest.mark.filterwarnings("error")
def test_a_picture_is_drawn(tmp_path, records, height):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [START | {"unigram_entropy": 3.3}, *records]))
    assert _size(draw_run(tmp_path)) == (1690, height)
