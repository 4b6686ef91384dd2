"""The step through a pipeline: loss and every gradient equal the oracle's, and nothing about it shows elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.optim import path_name
from moejax.parallel import make_mesh
from moejax.parallel.rules import Rule
from moejax.testing import named_leaves
from moejax.train.durable import abstract_durable, durable, from_durable
from moejax.train.evaluate import make_eval_step, put_eval_batch
from moejax.train.state import init_state, make_layout
from tests.oracle.compare import check, sharding_small_leaves
from tests.oracle.examples import batch, model_config, parameters, train_config

EVERYTHING = model_config(
    num_layers=5,
    num_dense_layers=1,
    mlp_dim=20,
    norm_placement="peri",
    embed_norm=True,
    attention={"window_pattern": (3, -1), "qk_norm": "head"},
    moe={"num_shared_experts": 1, "shared_expert_dim": 8, "capacity_factor": 1.25},
    router={"balance_loss": "global", "balance_loss_weight": 0.3, "z_loss_weight": 0.05},
    z_loss_weight=0.1,
)
TIED = model_config(num_layers=4, tie_embeddings=True, router={"balance_loss": "instance", "balance_loss_weight": 0.3})


def piped(model, pp, dp, ep, *, virtual=1, microbatches=4, schedule="auto", **more):
    config = train_config(model, microbatches=microbatches, **more)
    return dataclasses.replace(config, mesh=MeshConfig(pp=pp, dp=dp, ep=ep, virtual_stages=virtual, schedule=schedule))


def test_everything_at_once_on_eight_devices():
    """Dense block, windows that differ between stages, capacity, documents, padding, and tokens that do not divide by the stages."""
    check(piped(EVERYTHING, 2, 2, 2), parameters(EVERYTHING), batch(documents=True, padding=True))


def test_p43_tied_embeddings_and_a_last_group_that_is_not_full():
    """Five microbatches on four ranks, all forward passes first; the embedding gets gradients from both ends."""
    config = piped(TIED, 4, 1, 2, microbatches=5, schedule="gpipe", batch_size=10)
    check(config, parameters(TIED), batch(10, padding=True))


def test_several_stages_on_a_rank_and_stages_of_different_length():
    """Five blocks on two ranks, in a V of four stages, leave three places empty."""
    router = {"balance_loss": "global", "balance_loss_weight": 0.3}
    model = model_config(num_layers=5, recompute="block", moe={"capacity_factor": 1.25}, router=router)
    check(piped(model, 2, 1, 2, virtual=2, schedule="v_shaped"), parameters(model), batch(padding=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "virtual", "microbatches", "schedule", "recompute"),
    [
        ((4, 1, 1), 1, 8, "1f1b", "none"),
        ((2, 1, 4), 1, 1, "gpipe", "block"),
        ((2, 4, 1), 2, 2, "interleaved", "selective"),
        ((4, 2, 1), 1, 2, "gpipe", "none"),
        ((2, 2, 2), 1, 4, "1f1b", "block"),
        ((2, 2, 2), 2, 4, "v_shaped", "none"),
        ((3, 1, 2), 1, 4, "1f1b", "selective"),
        ((2, 1, 2), 2, 8, "interleaved", "block"),
    ],
)
def test_meshes_schedules_and_recompute(mesh, virtual, microbatches, schedule, recompute):
    model = dataclasses.replace(EVERYTHING, recompute=recompute)
    config = piped(model, *mesh, virtual=virtual, microbatches=microbatches, schedule=schedule)
    check(config, parameters(model), batch(documents=True, seed=4))


GAPS = {"virtual": 2, "schedule": "v_shaped"}


@pytest.mark.parametrize(("blocks", "stages"), [(5, {}), (6, GAPS)], ids=["1f1b", "a V with gaps"])
def test_initial_weights_and_held_out_loss_are_those_of_one_device(blocks, stages):
    model = dataclasses.replace(EVERYTHING, num_layers=blocks)
    config = piped(model, 2, 2, 2, **stages)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    held_out = {name: value[:8] for name, value in batch(documents=True, padding=True, seed=7).items()}
    results = []
    with sharding_small_leaves():
        for one in (config, alone):
            mesh = make_mesh(one.mesh)
            state = init_state(one, mesh)
            step = make_eval_step(one, mesh)
            results.append((durable(one, mesh, state), step(state.params, state.router, put_eval_batch(held_out, mesh))))
    (piped_state, piped_loss), (state, loss) = results
    for name, leaf in named_leaves(state["master"]).items():
        np.testing.assert_array_equal(named_leaves(piped_state["master"])[name], leaf, err_msg=name)
    assert float(piped_loss["tokens"]) == float(loss["tokens"]) > 0
    np.testing.assert_allclose(float(piped_loss["loss_sum"]), float(loss["loss_sum"]), rtol=1e-6)


def test_what_is_saved_is_in_the_order_of_the_blocks_and_comes_back_to_its_places():
    """Each block's arrays hold its number; five blocks in a V of four stages leave three places empty."""
    model = dataclasses.replace(
        EVERYTHING,
        num_layers=6,
        moe=dataclasses.replace(
            EVERYTHING.moe, router=dataclasses.replace(EVERYTHING.moe.router, bias_update_rate=0.1, balance_loss_weight=0.0)
        ),
    )
    config = piped(model, 2, 2, 2, **GAPS)
    mesh = make_mesh(config.mesh)
    with sharding_small_leaves():
        wanted = abstract_durable(config, mesh)
        numbered = jax.tree_util.tree_map_with_path(_numbered, wanted)
        state = from_durable(config, mesh, numbered)
        back = durable(config, mesh, state)
    order = [0, 1, 4, -1, 2, -1, 3, -1]  # stages of 2, 1, 1, 1 blocks: rank 0 has the first and the last one
    for name, leaf in named_leaves(state.params["moe_blocks"]).items():
        np.testing.assert_array_equal(np.asarray(leaf, np.float32).reshape(8, -1).max(axis=1), np.maximum(order, 0), err_msg=name)
    np.testing.assert_array_equal(state.router["bias"].max(axis=1), np.maximum(order, 0))
    jax.tree.map(np.testing.assert_array_equal, back, numbered)
    assert jax.tree.map(lambda a: a.sharding, back) == jax.tree.map(lambda a: a.sharding, wanted)


def _numbered(path, leaf):
    """The number of the block in every element of its arrays, and zero in all others."""
    is_of_blocks = "moe_blocks" in path_name(path) or path_name(path).endswith("bias")
    numbers = np.arange(leaf.shape[0] if leaf.shape else 0, dtype=leaf.dtype).reshape(-1, *[1] * (len(leaf.shape) - 1))
    return jax.device_put(np.broadcast_to(numbers, leaf.shape) if is_of_blocks else np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def test_blocks_are_split_over_stages_and_the_rest_is_on_all():
    config = piped(EVERYTHING, 2, 2, 2)
    layout = make_layout(config, make_mesh(config.mesh))
    leaves, _ = jax.tree_util.tree_flatten_with_path(layout.rules, is_leaf=lambda leaf: isinstance(leaf, Rule))
    for path, rule in leaves:
        name = path_name(path)
        assert (rule.param[0] == "pp") == name.startswith("moe_blocks"), name
        assert ("pp" in rule.axes) != name.startswith("moe_blocks"), name


def test_what_the_executor_does_not_know_is_refused():
    config = dataclasses.replace(piped(EVERYTHING, 1, 1, 1), mesh=MeshConfig(pp=2, schedule="zero_bubble"))
    with pytest.raises(ConfigError, match=r"mesh\.schedule=zero_bubble can be planned"):
        make_layout(config, make_mesh(config.mesh))


def test_the_bias_of_routers_is_split_with_their_blocks():
    model = dataclasses.replace(
        EVERYTHING,
        moe=dataclasses.replace(
            EVERYTHING.moe, router=dataclasses.replace(EVERYTHING.moe.router, bias_update_rate=0.1, balance_loss_weight=0.0)
        ),
    )
    config = piped(model, 2, 1, 2)
    with sharding_small_leaves():
        state = init_state(config, make_mesh(config.mesh))
    assert state.router["bias"].sharding.shard_shape((4, 8)) == (2, 8)
    assert not jnp.any(state.router["bias"])
