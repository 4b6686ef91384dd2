"""Memory and traffic by arithmetic, against the arrays that a state really has."""

import dataclasses
import itertools
import math

import jax
import pytest

from moejax.config import MeshConfig
from moejax.parallel import make_mesh
from moejax.plan.formula import argument_bytes
from moejax.plan.payloads import step_traffic
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
