"""The state of training: the same bits on every mesh, really sharded, and described exactly without being made."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.parallel import make_mesh
from moejax.testing import named_leaves
from moejax.train.durable import durable, from_durable
from moejax.train.state import abstract_state, init_state, initial_router, make_parameters
from tests.oracle.compare import mesh_id
from tests.oracle.examples import model_config, on_mesh, parameter_shapes, train_config

MESHES = ((1, 1), (2, 1), (1, 2), (2, 4))
FLOAT32 = ("scale", "w_router")
"""Last names of the parameters that stay float32 whatever the compute dtype."""

MODEL = model_config(
    vocab_size=1024,
    embed_dim=32,
    init_std=0.1,
    dtype="bfloat16",
    moe={"expert_dim": 64},
)
CONFIG = train_config(MODEL, seed=5, optim={"skip_window": 16})


@pytest.fixture(scope="module")
def states():
    """A fresh state on every mesh."""
    configs = {mesh: on_mesh(CONFIG, *mesh) for mesh in MESHES}
    return {mesh: init_state(config, make_mesh(config.mesh)) for mesh, config in configs.items()}


def paths(state):
    """Dotted name -> leaf, not copied to the host."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.mark.parametrize("mesh", MESHES[1:], ids=mesh_id)
def test_a_seed_gives_the_same_bits_on_every_mesh(states, mesh):
    single, other = paths(states[1, 1]), paths(states[mesh])
    assert set(single) == set(other)
    for name, value in single.items():
        np.testing.assert_array_equal(np.asarray(other[name]), np.asarray(value), err_msg=name, strict=True)


def test_masters_have_the_names_and_shapes_of_the_parameter_tree(states):
    assert {name: leaf.shape for name, leaf in named_leaves(states[1, 1].master).items()} == parameter_shapes(MODEL)


def test_weights_have_the_deviation_that_was_set_and_scales_are_one(states):
    for name, value in named_leaves(states[1, 1].master).items():
        if name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            assert 0 < np.abs(value).max() <= 0.3, name
            assert value.std() == pytest.approx(0.1 * 0.9866, rel=5 / math.sqrt(2 * value.size)), name
            assert abs(value.mean()) < 5 * 0.1 / math.sqrt(value.size), name


def test_no_two_layers_experts_or_leaves_start_alike(states):
    weights = {name: value for name, value in named_leaves(states[1, 1].master).items() if not name.endswith("scale")}
    firsts = [value.ravel()[:16].tobytes() for value in weights.values()]
    firsts += [part.ravel()[:16].tobytes() for value in weights.values() for part in value[1:]]
    w_in = weights["moe_blocks.moe.experts.w_in"]
    firsts += [w_in[layer, expert].ravel()[:16].tobytes() for layer in range(2) for expert in range(1, 8)]
    assert len(set(firsts)) == len(firsts)


def test_another_seed_changes_every_weight(states):
    config = dataclasses.replace(CONFIG, seed=6)
    other = named_leaves(init_state(config, make_mesh(config.mesh)).master)
    for name, value in named_leaves(states[1, 1].master).items():
        assert name.endswith("scale") or (value != other[name]).mean() > 0.99, name


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_parameters_are_the_masters_cast(states, mesh):
    master = named_leaves(states[mesh].master)
    for name, value in named_leaves(states[mesh].params).items():
        dtype = jnp.float32 if name.endswith(FLOAT32) else jnp.bfloat16
        np.testing.assert_array_equal(value, master[name].astype(dtype), err_msg=name, strict=True)


def test_moments_bias_history_and_counts_start_at_zero(states):
    config, state = on_mesh(CONFIG, 2, 4), states[2, 4]
    assert jax.tree.map(jnp.shape, state.moments) == {"mu": jax.tree.map(jnp.shape, state.master)} | {
        "nu": jax.tree.map(jnp.shape, state.master)
    }
    assert state.router["bias"].shape == (2, 8)
    assert state.history["loss"].shape == state.history["grad_norm"].shape == (16,)
    rest = {name: leaf for name, leaf in paths(durable(config, make_mesh(config.mesh), state)).items() if "master" not in name}
    assert not any(np.asarray(leaf).any() for leaf in rest.values())
    assert state.step.dtype == state.updates.dtype == jnp.int32


def bytes_per_device(tree):
    held = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


LARGE = {
    "embed.w_embed": P(("dp", "ep"), None),
    "head.w_head": P(("dp", "ep"), None),
    "moe_blocks.moe.experts.w_in": P("dp", "ep", None, None, None),
}
"""State of the leaves with 64 KiB or more on a device of the mesh (2, 4)."""


def test_state_of_large_leaves_is_split_over_all_devices(states):
    state = states[2, 4]
    for tree in (state.master, state.moments["mu"], state.moments["nu"]):
        for name in LARGE:
            leaf = paths(tree)[name]
            assert set(bytes_per_device(leaf).values()) == {leaf.nbytes / 8}, name
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.master))
    assert max(bytes_per_device(state.master).values()) < 0.45 * whole


def test_each_rank_holds_its_own_experts_alone(states):
    for mesh in MESHES:
        w_in = states[mesh].params["moe_blocks"]["moe"]["experts"]["w_in"]
        for shard in w_in.addressable_shards:
            experts, rank = 8 // mesh[1], shard.device.id % mesh[1]
            assert shard.data.shape[1] == experts
            assert shard.index[1].indices(8)[:2] == (rank * experts, (rank + 1) * experts)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)], ids=mesh_id)
def test_the_abstract_state_describes_the_real_one(states, mesh):
    config = on_mesh(CONFIG, *mesh)
    abstract, real = paths(abstract_state(config, make_mesh(config.mesh))), paths(states[mesh])
    assert set(abstract) == set(real)
    for name, leaf in real.items():
        assert (abstract[name].shape, abstract[name].dtype) == (leaf.shape, leaf.dtype), name
        assert abstract[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name


def test_large_leaves_are_sharded_as_written():
    config = on_mesh(CONFIG, 2, 4)
    flat = paths(abstract_state(config, make_mesh(config.mesh)).master)
    assert {name: flat[name].sharding.spec for name in LARGE} == LARGE


def test_parameters_follow_from_what_a_checkpoint_holds(states):
    config, state = on_mesh(CONFIG, 2, 4), states[2, 4]
    mesh = make_mesh(config.mesh)
    kept = durable(config, mesh, state)
    assert set(kept) == {"master", "moments", "router", "history", "step", "updates"}
    back = paths(from_durable(config, mesh, kept))
    for name, leaf in paths(state).items():
        np.testing.assert_array_equal(back[name], leaf, err_msg=name, strict=True)
        assert back[name].sharding == leaf.sharding
    doubled = make_parameters(config, mesh, jax.tree.map(lambda master: 2 * master, kept["master"]))
    for name, leaf in named_leaves(doubled).items():
        np.testing.assert_array_equal(leaf, 2 * named_leaves(state.params)[name], err_msg=name)


def test_a_dense_model_has_no_router_state():
    config = train_config(model_config(num_layers=1, num_dense_layers=1, mlp_dim=8))
    assert initial_router(config) == {}
    assert abstract_state(config, make_mesh(config.mesh)).router == {}
