"""What the stages of the model keep: activations, never weights, and with which recompute how much."""

import dataclasses
import math
from unittest import mock

import jax
import pytest

from moejax.config import MeshConfig
from moejax.nn import layers
from moejax.parallel import make_mesh
from moejax.train.state import abstract_state, make_layout
from moejax.train.step import abstract_batch, make_train_step
from tests.oracle.examples import model_config, train_config

MODEL = model_config(
    num_layers=3,
    num_dense_layers=1,
    mlp_dim=20,
    norm_placement="peri",
    attention={"qk_norm": "head"},
    moe={"num_shared_experts": 1, "shared_expert_dim": 8},
)


def kept_by(recompute: str, mesh: MeshConfig) -> list[tuple[str, tuple[int, ...]]]:
    """(stack, shape for one layer) of every array that the traced step keeps."""
    found, keep = [], layers.keep

    def watched(run, x, slots=None):
        y, report, kept = keep(run, x, slots)
        lead = 1 if slots is None else 2
        found.extend((run.name, a.shape[lead:]) for a in jax.tree.leaves(kept))
        return y, report, kept

    config = dataclasses.replace(train_config(dataclasses.replace(MODEL, recompute=recompute), microbatches=2), mesh=mesh)
    made = make_mesh(mesh)
    with mock.patch.object(layers, "keep", watched):
        make_train_step(config, made).trace(abstract_state(config, made), abstract_batch(config, made))
    return found


@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_no_leaf_has_the_size_of_a_weight(recompute):
    mesh = MeshConfig(pp=2, ep=2)
    specs = make_layout(dataclasses.replace(train_config(MODEL), mesh=mesh), make_mesh(mesh)).specs
    weights = {math.prod(spec.shape[1:]) // (2 if "expert" in spec.logical_axes else 1) for spec in jax.tree.leaves(specs["moe_blocks"])}
    shapes = [shape for name, shape in kept_by(recompute, mesh) if name == "moe_blocks" and math.prod(shape) > 16]  # scales have 16
    assert shapes
    assert not [shape for shape in shapes if math.prod(shape) in weights]


def test_recompute_decides_how_much_is_kept():
    """With block that is the input of a block and its routing, and nothing that is as large."""
    sizes = {
        mode: sum(math.prod(shape) for name, shape in set(kept_by(mode, MeshConfig())) if name == "moe_blocks")
        for mode in ("none", "selective", "block")
    }
    assert sizes["none"] > sizes["selective"] > sizes["block"]
    shapes = {shape for name, shape in kept_by("block", MeshConfig()) if name == "moe_blocks"}
    assert [shape for shape in shapes if len(shape) == 3] == [(8, 5, 16)]
