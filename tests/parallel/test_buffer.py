"""How much memory the receive buffer of a dispatch takes: what is asked for, and room for the tiles of the local experts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig, MoEConfig
from moejax.parallel import make_mesh
from moejax.parallel.expert import expert_parallel, receive_rows
from moejax.parallel.expert.transports import TRANSPORTS
from moejax.plan.moves import dispatch_buffer_bytes
from tests.oracle.examples import model_config, train_config

REAL = {
    # tokens of a rank, width, top_k, experts, ep
    "olmo3moe 8 layers": (8192, 4096, 4, 128, 8),
    "qwen3 30b": (8192, 2048, 8, 128, 8),
    "olmoe": (16384, 2048, 8, 64, 8),
    "mixtral 8x7b": (8192, 4096, 2, 8, 8),
    "deepseek v3": (4096, 7168, 8, 256, 64),
}


def config_of(name: str, dtype: str, capacity_factor: float | None):
    tokens, width, top_k, experts, ep = REAL[name]
    moe = MoEConfig(num_experts=experts, top_k=top_k, expert_dim=64, capacity_factor=capacity_factor)
    model = dataclasses.replace(model_config(embed_dim=width, dtype=dtype), moe=moe)
    return train_config(model, ep=ep, batch_size=ep, seq_len=tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", REAL)
def test_p23_buffer_bytes_are_routes_times_width_times_capacity_within_5_percent(name, dtype):
    tokens, width, top_k, *_ = REAL[name]
    for factor in (1.25, 2.0):
        wanted = tokens * top_k * width * {"bfloat16": 2, "float32": 4}[dtype] * factor
        assert 1 <= dispatch_buffer_bytes(config_of(name, dtype, factor)) / wanted <= 1.05


@pytest.mark.parametrize("name", REAL)
def test_dropless_takes_no_more_than_the_usual_capacity(name):
    dropless, usual = (dispatch_buffer_bytes(config_of(name, "bfloat16", factor)) for factor in (None, 1.25))
    assert 0.75 * usual < dropless <= usual


@pytest.mark.parametrize("factor", [None, 0.3, 1.25, 100.0])
@pytest.mark.parametrize(("ep", "top_k", "tile"), [(1, 2, 8), (4, 3, 8), (8, 2, 16)])
def test_the_layer_allocates_what_the_formula_says(ep, top_k, tile, factor):
    allocated = []

    def expert_fn(rows, group_sizes):
        allocated.append(rows.shape[0])
        return rows

    def run(x, experts, weights, valid):
        return expert_parallel(
            x, experts, weights, valid, expert_fn, num_experts=8, capacity_factor=factor, tile=tile, transport=TRANSPORTS["gather"]
        )[0]

    mapped = jax.shard_map(run, mesh=make_mesh(MeshConfig(ep=ep)), in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    shapes = ((9 * ep, 4), jnp.float32), ((9 * ep, top_k), jnp.int32), ((9 * ep, top_k), jnp.float32), ((9 * ep,), jnp.bool_)
    jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert set(allocated) == {receive_rows(tokens=9, top_k=top_k, num_experts=8, ranks=ep, capacity_factor=factor, tile=tile)}
