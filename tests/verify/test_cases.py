"""How a config is made small, which ways of running it there are, and which few of them are enough."""

import dataclasses
import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import TrainConfig, load_config
from moejax.config.load import config_names
from moejax.verify import DEVICES, Case, all_cases, covering_cases
from moejax.verify.cover import cover_pairs
from moejax.verify.shrink import LENGTH, shrink


@pytest.mark.parametrize("name", sorted(config_names()))
def test_a_small_config_has_the_structure_of_the_large_one(name):
    config, small = load_config(name), shrink(load_config(name))
    model, little = config.model, small.model
    assert little.num_layers * little.embed_dim < 1000
    for field in ("norm_placement", "norm_eps", "embed_scale", "embed_norm", "tie_embeddings"):
        assert getattr(little, field) == getattr(model, field)
    assert little.num_dense_layers == min(model.num_dense_layers, 2)
    assert (little.attention.num_heads == little.attention.kv_heads) == (model.attention.num_heads == model.attention.kv_heads)
    assert len(little.attention.window_pattern) == len(model.attention.window_pattern)
    assert small.data.document_mask == config.data.document_mask
    if model.moe is not None:
        assert little.moe is not None
        assert [little.moe.num_experts % n == 0 for n in (2, 4, 8)] == [model.moe.num_experts % n == 0 for n in (2, 4, 8)]
        assert little.moe.capacity_factor == model.moe.capacity_factor
        changed = {"balance_loss_weight", "z_loss_weight"}
        for field in dataclasses.fields(model.moe.router):
            if field.name not in changed:
                assert getattr(little.moe.router, field.name) == getattr(model.moe.router, field.name)


@pytest.mark.parametrize(
    ("experts", "top_k", "expected"), [(96, 8, (16, 4)), (60, 4, (12, 4)), (7, 7, (7, 7)), (34, 34, (10, 10)), (27, 1, (9, 1))]
)
def test_experts_divide_over_the_same_ranks(experts, top_k, expected):
    words = ("--model.moe.num-experts", str(experts), "--model.moe.top-k", str(top_k))
    moe = shrink(load_config("quickstart", words)).model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k) == expected


def test_windows_keep_their_share_of_a_sequence():
    config = load_config("shakespeare_moe")
    attention = dataclasses.replace(config.model.attention, window_pattern=(1, config.data.seq_len // 2, 10_000, -1))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))
    assert shrink(config).model.attention.window_pattern == (2, LENGTH // 2, LENGTH, -1)


def test_every_case_is_one_that_a_run_could_have():
    small = shrink(load_config("large_128e"))
    cases = all_cases(small)
    assert cases[0].words == "--model.moe.grouped_matmul cpu"
    assert len(set(cases)) == len(cases)
    assert {case.pp for case in cases} == {1, 2, 4}
    assert {case.schedule for case in cases if case.pp == 2} == {"gpipe", "1f1b", "interleaved", "v_shaped"}
    assert {case.transport for case in cases if case.ep > 1} == {"gather", "dense", "ring"}
    for case in cases[::37]:
        config = case.config(small)
        assert isinstance(config, TrainConfig)
        assert config.mesh.num_devices <= DEVICES


def test_recompute_keep_is_the_users():
    small = shrink(load_config("quickstart"))
    assert Case(recompute="selective").config(small, ("qkv",)).model.recompute_keep == ("qkv",)


def test_few_cases_hold_every_pair_of_settings():
    cases = all_cases(shrink(load_config("quickstart")))
    few = covering_cases(cases)
    assert len(few) < 30 < len(cases) / 10
    assert few[0] == cases[0]

    def pairs(case):
        values = case.values | {"schedule": (case.schedule, case.virtual_stages)}
        return set(combinations(sorted(values.items(), key=str), 2))

    assert set.union(*map(pairs, few)) == set.union(*map(pairs, cases))


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=60))
def test_rows_that_cover_hold_every_pair(rows):
    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}

    chosen = cover_pairs(rows)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen) <= math.comb(4, 2) * 16
    assert set.union(*(pairs(rows[i]) for i in chosen)) == set.union(*map(pairs, rows))


def test_nothing_to_cover():
    assert cover_pairs([]) == []
