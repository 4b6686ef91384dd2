"""What is suggested for a step that does not fit."""

import dataclasses

import pytest

from moejax.config import load_config
from moejax.plan.estimate import ERROR, memory_bytes, scaled, usable_bytes
from moejax.plan.fit import MAX_GPUS, nearest_that_fit
from moejax.plan.gpus import find_gpu
from tests.plan.programs import eight_layers


def big(**model):
    """The 47B model with two sequences a GPU: more than an H200 has."""
    config = eight_layers(dp=1, ep=8, num_experts=128, **model)
    return dataclasses.replace(config, batch_size=512, microbatches=32)


def undone(config, suggestion, name):
    """The suggested config with one change taken back; the two axes of the mesh change together."""
    changed = suggestion.config
    if name.startswith("mesh."):
        fields = ("weights",) if name == "mesh.weights" else ("dp", "ep")
        return dataclasses.replace(
            changed, mesh=dataclasses.replace(changed.mesh, **{field: getattr(config.mesh, field) for field in fields})
        )
    if name == "model.recompute":
        return dataclasses.replace(changed, model=dataclasses.replace(changed.model, recompute=config.model.recompute))
    return dataclasses.replace(changed, microbatches=config.microbatches)


def needed(config, scale=1.0):
    """What has to fit: arithmetic, scaled as a compiled step asked for, and what it may be low by."""
    return sum(scaled(memory_bytes(config), scale * (1 + ERROR)).values())


def load(name, *words):
    return load_config(name, words)


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_suggestions_fit_with_as_many_gpus_and_none_of_their_changes_is_needless(scale):
    config, gpu = big(), find_gpu("h200")
    found = nearest_that_fit(config, gpu, scale=scale)
    assert 1 <= len(found) <= 3
    for suggestion in found:
        assert suggestion.config.mesh.num_devices == 8
        assert suggestion.config.batch_size == 512
        assert suggestion.memory == scaled(memory_bytes(suggestion.config), scale)
        assert needed(suggestion.config, scale) <= usable_bytes(gpu)
        for name in suggestion.changes:
            assert needed(undone(config, suggestion, name), scale) > usable_bytes(gpu)
    assert len({s.config.mesh for s in found}) == len(found)


def test_words_can_be_typed():
    first = nearest_that_fit(big(), find_gpu("h200"))[0]
    assert first.words == "--model.recompute block"
    assert load("eight_layers", "--model.moe.num-experts", "128", *first.words.split()).model.recompute == "block"


def test_names_that_were_kept_go_with_the_mode():
    config = big(recompute="selective", recompute_keep=("expert_out", "attention"))
    found = nearest_that_fit(config, find_gpu("h200"))
    assert all(s.config.model.recompute_keep == () for s in found if "model.recompute" in s.changes)


def test_more_gpus_are_suggested_only_if_nothing_else_helps():
    found = nearest_that_fit(big(), find_gpu("h100"))
    assert 8 < found[0].config.mesh.num_devices <= MAX_GPUS
    assert all(s.total_bytes <= usable_bytes(find_gpu("h100")) for s in found)


def test_more_ranks_for_experts_are_found_and_stay_in_one_host_if_they_can():
    """On one GPU nothing helps; eight of one host split the experts without a change beside that."""
    assert "--mesh.ep 8" in [s.words for s in nearest_that_fit(load("eight_layers", "--mesh.ep", "1"), find_gpu("b300"))]
    many = nearest_that_fit(load("eight_layers", "--model.moe.num-experts", "1024"), find_gpu("h100"))
    assert many[0].config.mesh.ep == 128
    assert many[0].config.model.recompute != "none"
    tiny = nearest_that_fit(load("tiny_64e"), find_gpu("h200"))
    assert all(s.config.mesh.ep <= 8 for s in tiny)


def test_ranks_and_stages_together_are_found_for_a_pipeline():
    ultra = nearest_that_fit(load("ultra_256e"), find_gpu("h100"))
    assert {s.config.mesh.num_devices for s in ultra} == {2048}, "on 512 and 1,024 nothing fits"
    assert any(s.config.mesh.ep > 32 for s in ultra)
    assert any(s.config.mesh.pp > 8 for s in ultra)


def test_a_rack_of_nvlink_is_worth_more_ranks_than_a_host():
    """Where 64 GPUs are one domain, the cheapest mesh may split experts over more than eight."""
    config = load("ultra_128e")
    host, rack = (nearest_that_fit(config, find_gpu(gpu))[0].config.mesh for gpu in ("b200", "gb200"))
    assert host.ep == 8 < rack.ep <= 64


def test_sequences_are_shortened_if_that_alone_helps():
    long = load("eight_layers", "--data.seq-len", "524288", "--batch-size", "8", "--microbatches", "1")
    (found,) = nearest_that_fit(long, find_gpu("h200"))
    assert found.words == "--model.recompute block --data.seq-len 65536"


def test_nothing_is_suggested_for_what_fits_nowhere():
    config = big()
    experts = dataclasses.replace(config.model.moe, num_experts=1024, expert_dim=65_536)
    huge = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=experts, num_layers=64))
    assert nearest_that_fit(huge, find_gpu("h100")) == []
