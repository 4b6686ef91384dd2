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


def piped(model, pp, dp, ep, *, microbatches=4, schedule="auto", **more):
    config = train_config(model, microbatches=microbatches, **more)
    return dataclasses.replace(config, mesh=MeshConfig(pp=pp, dp=dp, ep=ep, schedule=schedule))


def test_everything_at_once_on_eight_devices():
    """Dense block, windows that differ between stages, capacity, documents, padding, and tokens that do not divide by the stages."""
    check(piped(EVERYTHING, 2, 2, 2), parameters(EVERYTHING), batch(documents=True, padding=True))


def test_tied_embeddings_and_a_last_group_that_is_not_full():
    """Five microbatches on four ranks, all forward passes first; the embedding gets gradients from both ends."""
    config = piped(TIED, 4, 1, 2, microbatches=5, schedule="gpipe", batch_size=10)
    check(config, parameters(TIED), batch(10, padding=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "recompute"),
    [
        ((4, 1, 1), 8, "1f1b", "none"),
        ((2, 1, 4), 1, "gpipe", "block"),
        ((2, 4, 1), 2, "1f1b", "selective"),
        ((4, 2, 1), 2, "gpipe", "none"),
        ((2, 2, 2), 4, "1f1b", "block"),
    ],
)
def test_meshes_schedules_and_recompute(mesh, microbatches, schedule, recompute):
    model = dataclasses.replace(EVERYTHING, recompute=recompute)
    check(piped(model, *mesh, microbatches=microbatches, schedule=schedule), parameters(model), batch(documents=True, seed=4))


def test_initial_weights_and_held_out_loss_are_those_of_one_device():
    config = piped(EVERYTHING, 2, 2, 2)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    held_out = {name: value[:4] for name, value in batch(documents=True, padding=True, seed=7).items()}
    results = []
    with sharding_small_leaves():
        for one in (config, alone):
            mesh = make_mesh(one.mesh)
            state = init_state(one, mesh)
            step = make_eval_step(one, mesh)
            results.append((state, step(state.params, state.router, put_eval_batch(held_out, mesh))))
    (piped_state, piped_loss), (state, loss) = results
    for name, leaf in named_leaves(state.master).items():
        np.testing.assert_array_equal(named_leaves(piped_state.master)[name], leaf, err_msg=name)
    assert float(piped_loss["tokens"]) == float(loss["tokens"]) > 0
    np.testing.assert_allclose(float(piped_loss["loss_sum"]), float(loss["loss_sum"]), rtol=1e-6)


def test_blocks_are_split_over_stages_and_the_rest_is_on_all():
    config = piped(EVERYTHING, 2, 2, 2)
    layout = make_layout(config, make_mesh(config.mesh))
    leaves, _ = jax.tree_util.tree_flatten_with_path(layout.rules, is_leaf=lambda leaf: isinstance(leaf, Rule))
    for path, rule in leaves:
        name = path_name(path)
        assert (rule.param[0] == "pp") == name.startswith("moe_blocks"), name
        assert ("pp" in rule.axes) != name.startswith("moe_blocks"), name


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"pp": 3}, "mesh.pp=3 for 4 MoE blocks can be planned .*; use --mesh.pp 4"),
        ({"pp": 2, "virtual_stages": 2}, "mesh.virtual_stages=2 can be planned .*; use --mesh.virtual-stages 1$"),
        ({"pp": 2, "schedule": "zero_bubble"}, "mesh.schedule=zero_bubble can be planned .*; use --mesh.schedule auto$"),
        (
            {"pp": 2, "virtual_stages": 2, "schedule": "1f1b"},
            "mesh.schedule=1f1b has 1 stage on each rank, not mesh.virtual_stages=2; use mesh",
        ),
    ],
)
def test_what_the_executor_does_not_know_is_refused(mesh, message):
    config = dataclasses.replace(piped(EVERYTHING, 1, 1, 1), mesh=MeshConfig(**mesh))
    with pytest.raises(ConfigError, match=message):
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
