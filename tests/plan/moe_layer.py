"""One MoE layer alone, forward and backward, compiled for GPUs; called in a process of its own."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig, MoEConfig
from moejax.nn import is_spec, tokens_of
from moejax.nn.moe import MoE
from moejax.nn.param import make_template
from moejax.parallel.rules import make_rule
from moejax.plan.aot import Program, compile_program, gpu_mesh


def compile_layer(gpu: str, ranks: int, tokens: int, dim: int, moe: MoEConfig) -> Program:
    """Output's and all gradients' program; tokens are those of one GPU."""
    mesh = gpu_mesh(gpu, MeshConfig(ep=ranks))
    template = make_template(lambda: MoE(dim, moe, 0.02))
    placed = jax.tree.map(lambda s: make_rule(s.shape, s.logical_axes, dict(mesh.shape)).param, template.specs, is_leaf=is_spec)

    def layer(params, x):
        def loss(params, x):
            segment = jnp.ones(x.shape[:2], jnp.int32)
            known = tokens_of(segment, segment, first_row=0, seed=0, step=jnp.int32(0))
            y, stats = template.bind(params)(x, known, jnp.zeros(moe.num_experts), jnp.int32(0), dropless=False)
            return (y.astype(jnp.float32) ** 2).sum() + stats.balance_loss

        return jax.grad(loss, (0, 1))(params, x)

    def array(spec, place):
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype or "bfloat16", sharding=NamedSharding(mesh, place))

    params = jax.tree.map(array, template.specs, placed, is_leaf=is_spec)
    x = jax.ShapeDtypeStruct((ranks, tokens, dim), jnp.bfloat16, sharding=NamedSharding(mesh, P("ep")))
    specs = (placed, P("ep"))
    return compile_program(jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)), mesh, params, x)
