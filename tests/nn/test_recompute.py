"""What recomputation keeps, what it moves to host memory, and what it never does twice."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from moejax.config import RESIDUALS, TrainConfig
from moejax.errors import ConfigError
from moejax.nn.recompute import describe_offload, offloaded_bytes
from moejax.parallel import make_mesh
from moejax.train.state import abstract_state
from moejax.train.step import make_grad_fn
from tests.oracle.compare import sharding_small_leaves
from tests.oracle.examples import model_config, train_config

LAYERS, TOKENS, TOP_K, WIDTH = 3, 8 * 5, 2, 16
MODEL = model_config(
    num_layers=LAYERS,
    num_dense_layers=1,
    mlp_dim=20,
    attention={"num_heads": 2, "num_kv_heads": 1},
    moe={"num_shared_experts": 1, "shared_expert_dim": 10, "capacity_factor": 1.25},
)


def traced(config: TrainConfig):
    """The jaxpr of the gradient function of one device's share."""
    mesh = make_mesh(config.mesh)
    state = abstract_state(config, mesh)
    part = jax.ShapeDtypeStruct((config.microbatches, config.microbatch_size, config.data.seq_len), jnp.int32)
    batch = dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), part)
    return make_grad_fn(config, mesh).trace(state.params, state.router, jax.ShapeDtypeStruct((), jnp.int32), batch).jaxpr


def rows_of_buffer() -> int:
    """ceil(1.25 T A) rows, without padding on a CPU."""
    return -(-TOKENS * TOP_K * 5 // 4)


EXPECTED = {
    "block_in": LAYERS * TOKENS * WIDTH,
    "qkv": LAYERS * TOKENS * (WIDTH + 2 * WIDTH // 2),
    "attention": LAYERS * TOKENS * (WIDTH + 2),  # the result, and the logsumexp of two heads
    "expert_rows": 2 * rows_of_buffer() * WIDTH,
    "expert_gate_up": 2 * rows_of_buffer() * 2 * 12,
    "expert_out": 2 * TOKENS * TOP_K * WIDTH,
    "shared_gate_up": 2 * TOKENS * 2 * 10,
    "mlp_gate_up": TOKENS * 2 * 20,
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_p48_every_name_that_can_be_offloaded_moves_the_bytes_of_its_result(name):
    """Named alone, so that nothing else can stand in for it; two microbatches move twice as much."""
    model = dataclasses.replace(MODEL, recompute="offload", recompute_keep=(name,))
    moved = offloaded_bytes(traced(train_config(model, ep=2, batch_size=32, microbatches=2)))
    assert set(moved) == {name}
    assert moved[name] == 2 * 4 * EXPECTED[name]


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
def test_other_modes_move_nothing_to_the_host(mode):
    assert offloaded_bytes(traced(train_config(dataclasses.replace(MODEL, recompute=mode), ep=2))) == {}


MOVES = {"none": 4, "block": 6, "selective": 4, "offload": 6}


def test_attention_that_is_kept_is_not_computed_twice():
    """Scores and weighted values are the two products of a forward pass; the backward pass has its own in every mode."""
    base = dataclasses.replace(MODEL, num_dense_layers=0, mlp_dim=0)
    configs = {mode: train_config(dataclasses.replace(base, recompute=mode)) for mode in ("none", "selective", "block")}
    products = {mode: Counter(primitives(traced(config).jaxpr))["dot_general", 5] for mode, config in configs.items()}
    assert products["selective"] == products["none"]
    assert products["block"] == products["none"] + 2


@pytest.mark.parametrize("mode", MOVES)
def test_routing_is_never_done_twice_and_rows_travel_no_more_than_they_must(mode):
    """One gather of counts (1-d operand) per MoE layer in every mode; the row moves of dispatch, combine and their backward passes."""
    model = dataclasses.replace(MODEL, recompute=mode, moe=dataclasses.replace(MODEL.moe, transport="gather"))
    found = Counter(primitives(traced(train_config(model, ep=2)).jaxpr))
    assert found["all_gather", 1] == 1
    assert found["all_gather", 2] == MOVES[mode]
    assert found["top_k", 2] == 1


def test_fsdp_gathers_weights_again_for_the_backward_pass_and_keeps_none():
    """All-gathers over dp of arrays; each weight's once forward and once backward, also where everything else is kept."""
    found = {}
    for mode in ("none", "block"):
        config = train_config(dataclasses.replace(MODEL, recompute=mode), dp=2)
        config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, weights="fsdp"))
        with sharding_small_leaves():
            found[mode] = sum(n for (name, _), n in Counter(primitives(traced(config).jaxpr)).items() if name == "all_gather")
    assert found["none"] == found["block"] > 0


def primitives(jaxpr):
    """(name, rank of the first operand) of every equation, those of inner jaxprs once."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, eqn.invars[0].aval.ndim if eqn.invars else 0
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from primitives(inner.jaxpr)


def test_the_line_on_offloading_names_sizes():
    model = dataclasses.replace(MODEL, recompute="offload", recompute_keep=("block_in", "mlp_gate_up"))
    line = describe_offload(model, traced(train_config(model, ep=2)))
    total, block_in, hidden = (4 * size / 2**20 for size in (3 * 640 + 40 * 40, 3 * 640, 40 * 40))
    assert line == (
        f"offload    {total:.1f} MiB to host memory and back in each step and device: block_in {block_in:.1f}, mlp_gate_up {hidden:.1f}"
    )


def test_p48_offloading_what_nobody_needs_is_refused():
    model = dataclasses.replace(MODEL, recompute="offload")
    without = traced(train_config(dataclasses.replace(MODEL, recompute="block"), ep=2))
    with pytest.raises(
        ConfigError, match=r"model.recompute_keep=\('block_in',\) holds 'block_in', which the backward pass .* leave it out"
    ):
        describe_offload(model, without)
