"""Memory and traffic by arithmetic, against the arrays that a state really has."""

import dataclasses
import itertools
import math

import jax
import pytest

from moejax.config import MeshConfig
from moejax.parallel import make_mesh
from moejax.plan.formula import argument_bytes, row_bytes, step_traffic
from moejax.train.state import abstract_state
from moejax.train.step import abstract_batch
from tests.oracle.compare import sharding_small_leaves
from tests.oracle.examples import model_config, train_config

MODEL = model_config(num_layers=3, num_dense_layers=1, mlp_dim=20, moe={"num_shared_experts": 1, "shared_expert_dim": 8})


def local_bytes(tree) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PLACEMENTS = [*itertools.product([(1, 1, 1), (1, 2, 4), (1, 1, 8)], ["resident", "fsdp"]), ((2, 2, 2), "resident")]
"""(pp, dp, ep) and mesh.weights; fsdp is refused with stages."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "weights"), PLACEMENTS)
def test_arguments_are_the_bytes_of_the_state_and_the_batch(mesh, dtype, weights):
    config = train_config(dataclasses.replace(MODEL, dtype=dtype), microbatches=2)
    pp, dp, ep = mesh
    config = dataclasses.replace(config, mesh=MeshConfig(pp=pp, dp=dp, ep=ep, weights=weights))
    devices = make_mesh(config.mesh)
    with sharding_small_leaves():
        given, state = argument_bytes(config), abstract_state(config, devices)
    assert given["parameters"] == local_bytes(state.params)
    assert given["optimizer"] == local_bytes((state.master, state.moments))
    assert given["router"] == local_bytes(state.router)
    assert given["counters"] == local_bytes((state.history, state.step, state.updates))
    assert given["batch"] == local_bytes(abstract_batch(config, devices))


def test_a_dense_model_has_no_router():
    config = train_config(model_config(num_layers=2, num_dense_layers=2, mlp_dim=20))
    assert argument_bytes(config)["router"] == 0
    assert step_traffic(config) == []


def test_rows_of_a_rank():
    assert row_bytes(train_config(MODEL, dp=2, ep=4, microbatches=2)) == 16 // 2 // 8 * 5 * 2 * 16 * 4


MOVES = {"none": 4, "block": 6, "selective": 4, "offload": 6}


@pytest.mark.parametrize("mode", MOVES)
def test_rows_travel_for_every_layer_and_microbatch(mode):
    config = train_config(dataclasses.replace(MODEL, recompute=mode), dp=2, ep=4, microbatches=2)
    (rows,) = (line for line in step_traffic(config) if line.kind == "ragged-all-to-all")
    assert (rows.axes, rows.dtype, rows.times) == (("ep",), "f32", 2 * 2 * MOVES[mode])
    assert rows.payload == rows.times * row_bytes(config)


def test_weights_travel_once_a_step_or_with_fsdp_in_every_microbatch():
    resident = train_config(MODEL, dp=2, ep=4, microbatches=2)
    fsdp = dataclasses.replace(resident, mesh=dataclasses.replace(resident.mesh, weights="fsdp"))
    with sharding_small_leaves():
        once, often = ({line[:3]: line for line in step_traffic(config) if line.dtype == "f32"} for config in (resident, fsdp))
    experts = 2 * 8 // 4 * (16 * 2 * 12 + 12 * 16)
    assert once["reduce-scatter", ("dp",), "f32"].payload == once["all-gather", ("dp",), "f32"].payload == 4 * experts
    assert often["reduce-scatter", ("dp",), "f32"].payload == 2 * 4 * experts
    assert often["all-gather", ("dp",), "f32"].payload == 2 * 2 * 4 * experts
