"""What is suggested for a step that does not fit."""

import dataclasses

import pytest

from moejax.plan.estimate import memory_bytes, usable_bytes
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


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_suggestions_fit_with_as_many_gpus_and_none_of_their_changes_is_needless(scale):
    config, gpu = big(), find_gpu("h200")
    found = nearest_that_fit(config, gpu, scale=scale)
    assert 1 <= len(found) <= 3
    assert [len(s.changes) for s in found] == sorted(len(s.changes) for s in found)
    for suggestion in found:
        assert suggestion.config.mesh.num_devices == 8
        assert suggestion.config.batch_size == 512
        assert suggestion.memory == memory_bytes(suggestion.config)
        assert suggestion.total_bytes * scale <= usable_bytes(gpu)
        for name in suggestion.changes:
            assert sum(memory_bytes(undone(config, suggestion, name)).values()) * scale > usable_bytes(gpu)


def test_words_can_be_typed():
    first = nearest_that_fit(big(), find_gpu("h200"))[0]
    assert first.words == "--model.recompute block --microbatches 64"


def test_names_that_were_kept_go_with_the_mode():
    config = big(recompute="selective", recompute_keep=("expert_out", "attention"))
    found = nearest_that_fit(config, find_gpu("h200"))
    assert all(s.config.model.recompute_keep == () for s in found if "model.recompute" in s.changes)


def test_more_gpus_are_suggested_only_if_nothing_else_helps():
    found = nearest_that_fit(big(), find_gpu("h100"))
    sizes = [s.config.mesh.num_devices for s in found]
    assert sizes == sorted(sizes)
    assert 8 < sizes[0] <= MAX_GPUS
    assert all(s.total_bytes <= usable_bytes(find_gpu("h100")) for s in found)


def test_nothing_is_suggested_for_what_fits_nowhere():
    config = big()
    experts = dataclasses.replace(config.model.moe, num_experts=1024)
    huge = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=experts, num_layers=64))
    assert nearest_that_fit(dataclasses.replace(huge, mesh=dataclasses.replace(huge.mesh, ep=2, dp=1)), find_gpu("h100")) == []
