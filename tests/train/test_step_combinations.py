"""Every pair of settings at least once: the rows of combinations.csv, each a step held against the oracle.

After changing FACTORS, run this file as a program to write the rows anew: python -m tests.train.test_step_combinations
"""

import csv
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from moejax.config import TrainConfig
from tests.oracle.compare import MIN_MARGIN, check, oracle_of
from tests.oracle.examples import batch, model_config, parameters, train_config

FILE = Path(__file__).with_name("combinations.csv")

FACTORS = {
    "mesh": ("2x1", "1x2", "2x4"),
    "microbatches": ("1", "2"),
    "norm_placement": ("pre", "post", "peri"),
    "qk_norm": ("none", "head", "width"),
    "kv_heads": ("1", "2", "4"),
    "window": ("none", "2", "3 and none"),
    "gating": ("softmax", "sigmoid", "topk_softmax"),
    "weights": ("plain scaled", "p=1", "p=2 restored"),
    "balance_loss": ("none", "local", "instance", "global"),
    "bias": ("zero", "random"),
    "shared": ("0", "1", "3"),
    "dense_layers": ("0", "1"),
    "ends": ("plain", "tied", "normed and scaled"),
    "capacity": ("none", "0.8", "1.25"),
    "transport": ("gather", "dense", "ring"),
    "grouped_matmul": ("auto", "reference"),
    "recompute": ("none", "block", "selective", "offload"),
    "placement": ("resident", "fsdp"),
    "data": ("whole", "documents", "padding"),
    "top_k": ("1", "2", "3"),
}
WEIGHTS = {
    "plain scaled": {"normalize": None, "scale": 2.5},
    "p=1": {"normalize": 1.0},
    "p=2 restored": {"normalize": 2.0, "restore_scale": True},
}
ENDS = {"plain": {}, "tied": {"tie_embeddings": True}, "normed and scaled": {"embed_norm": True, "embed_scale": 3.0}}
WINDOWS = {"none": (-1,), "2": (2,), "3 and none": (3, -1)}


def rows() -> list[dict[str, str]]:
    with FILE.open() as file:
        return list(csv.DictReader(file))


def config_of(row: dict[str, str]) -> TrainConfig:
    dense, shared = int(row["dense_layers"]), int(row["shared"])
    model = model_config(
        num_layers=2 + dense,
        num_dense_layers=dense,
        mlp_dim=20 * dense,
        norm_placement=row["norm_placement"],
        recompute=row["recompute"],
        z_loss_weight=0.02,
        **ENDS[row["ends"]],
        attention={
            "num_heads": 4,
            "num_kv_heads": int(row["kv_heads"]),
            "qk_norm": row["qk_norm"],
            "window_pattern": WINDOWS[row["window"]],
            "full_attention_ends": False,
        },
        moe={
            "top_k": int(row["top_k"]),
            "num_shared_experts": shared,
            "shared_expert_dim": 10 * (shared > 0),
            "capacity_factor": None if row["capacity"] == "none" else float(row["capacity"]),
            "transport": row["transport"],
            "grouped_matmul": row["grouped_matmul"],
        },
        router={
            "gating": row["gating"],
            "balance_loss": row["balance_loss"],
            "balance_loss_weight": 0.3,
            "z_loss_weight": 0.05,
            "bias_update_rate": 0.01 if row["bias"] == "random" else None,
        }
        | WEIGHTS[row["weights"]],
    )
    dp, ep = map(int, row["mesh"].split("x"))
    config = train_config(model, dp=dp, ep=ep, microbatches=int(row["microbatches"]))
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, weights=row["placement"]))


def uncovered(rows: list[dict[str, str]]) -> set:
    """Pairs of settings that no row holds."""
    pairs = {((a, x), (b, y)) for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2) for x, y in itertools.product(xs, ys)}
    return pairs - {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def test_the_rows_hold_every_pair_of_settings():
    assert not uncovered(rows())


@pytest.mark.slow
@pytest.mark.parametrize("row", rows() if FILE.exists() else [], ids=lambda row: "-".join(row.values()).replace(" ", "_"))
def test_p45_a_combination_equals_the_oracle(row):
    config = config_of(row)
    params, bias = parameters(config.model), None
    if row["bias"] == "random":
        bias = np.random.default_rng(0).normal(size=(2, 8)) * 0.1
    for seed in range(8):
        data = batch(documents=row["data"] != "whole", padding=row["data"] == "padding", seed=seed)
        if oracle_of(config, params, data, bias, ties=True).margin > MIN_MARGIN:
            break
    check(config, params, data, bias)


def write_rows() -> None:
    """Greedy: of many random rows, take the one that holds the most pairs still missing, until none is."""
    rng, chosen = np.random.default_rng(0), []
    while missing := uncovered(chosen):

        def gain(row, missing=missing):
            return sum(pair in missing for pair in itertools.combinations(row.items(), 2))

        candidates = []
        for _ in range(1000):
            first, second = sorted(missing)[int(rng.integers(len(missing)))]
            candidates.append({name: str(rng.choice(levels)) for name, levels in FACTORS.items()} | dict([first, second]))
        chosen.append(max(candidates, key=gain))
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTORS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(chosen)


if __name__ == "__main__":
    write_rows()
