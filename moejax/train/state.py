"""The state of training: what it is, where it lies, and how it starts.

Float32 masters and moments are the truth; compute-dtype parameters are always derived from the masters.
"""

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import TrainConfig, refuse_pending
from moejax.nn import STACKS, ParamSpec, Transformer, is_spec
from moejax.ops.hashing import truncated_normal
from moejax.optim import empty_history, init_moments, path_name
from moejax.parallel import fsdp, rules, zero
from moejax.parallel.pipeline import check_schedule, split_of
from moejax.parallel.pipeline.split import Split


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """params: compute dtype. master, moments {"mu", "nu"}: float32, sharded. router: {"bias": float32 [MoE layers, E]} or {}.

    history: of losses and norms, for skipping. step: int32, steps taken. updates: int32, steps applied.
    """

    params: dict
    master: dict
    moments: dict
    router: dict
    history: dict
    step: Any
    updates: Any


class Layout(NamedTuple):
    """The model for a mesh, and trees like its parameters: declarations, placement rules, and compute dtypes.

    specs are those of the arrays on the devices, where pipeline stages may change the order of MoE blocks and leave gaps (`split`).
    """

    model: Transformer
    specs: dict
    rules: dict
    dtypes: dict
    split: Split


def make_layout(config: TrainConfig, mesh: Mesh) -> Layout:
    """Where each parameter and its state live on this mesh.

    Raises:
        ConfigError: if the config names a part that can only be planned so far, or a schedule that cannot have its stages.
    """
    refuse_pending(config)
    check_schedule(config)
    mesh_shape, weights, split = dict(mesh.shape), config.mesh.weights, split_of(config)
    specs = Transformer(config.model).specs
    if "moe_blocks" in specs:
        places = split.order.size
        specs["moe_blocks"] = jax.tree.map(
            lambda spec: dataclasses.replace(spec, shape=(places, *spec.shape[1:])), specs["moe_blocks"], is_leaf=is_spec
        )

    def each(fn):
        return jax.tree.map(fn, specs, is_leaf=is_spec)

    placed = each(lambda spec: rules.make_rule(spec.shape, spec.logical_axes, mesh_shape, weights=weights))

    def gather(name: str, arrays: dict) -> dict:
        return fsdp.gather_weights(arrays, placed[name], is_stacked=name in STACKS)

    model = Transformer(config.model, gather if weights == "fsdp" else None)
    return Layout(model, specs, placed, each(lambda spec: jnp.dtype(spec.dtype or config.model.dtype)), split)


def state_specs(config: TrainConfig, layout: Layout) -> TrainState:
    """PartitionSpecs of a TrainState."""

    def pick(field):
        return jax.tree.map(lambda rule: getattr(rule, field), layout.rules, is_leaf=lambda r: isinstance(r, rules.Rule))

    shards = pick("state")
    router = {} if config.model.moe is None else {"bias": P("pp") if config.mesh.pp > 1 else P()}
    history = {"loss": P(), "grad_norm": P(), "count": P()}
    return TrainState(pick("param"), shards, {"mu": shards, "nu": shards}, router, history, P(), P())


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """A fresh state: the same values on every mesh, generated on the devices straight into their shards."""
    layout = make_layout(config, mesh)
    shardings = _shardings(config, mesh, layout)
    parts = ("master", "moments", "router", "history", "step", "updates")
    kept = {name: getattr(shardings, name) for name in parts}

    def build():
        master = jax.tree_util.tree_map_with_path(
            lambda path, spec: _initial(config.seed, path_name(path), spec, layout.split), layout.specs, is_leaf=is_spec
        )
        return {
            "master": master,
            "moments": init_moments(master),
            "router": initial_router(config),
            "history": empty_history(config.optim),
            "step": jnp.int32(0),
            "updates": jnp.int32(0),
        }

    rest = jax.jit(build, out_shardings=kept)()
    return TrainState(params=make_parameters(config, mesh, rest["master"]), **rest)


def initial_router(config: TrainConfig) -> dict:
    """Router state before training: zero bias for each MoE layer and expert."""
    if config.model.moe is None:
        return {}
    return {"bias": jnp.zeros((split_of(config).order.size, config.model.moe.num_experts), jnp.float32)}


def make_parameters(config: TrainConfig, mesh: Mesh, master: dict) -> dict:
    """Parameters for computing: masters cast and gathered."""
    layout = make_layout(config, mesh)
    specs = state_specs(config, layout)

    def gather(master):
        return zero.gather_parameters(master, layout.rules, layout.dtypes)

    mapped = jax.shard_map(gather, mesh=mesh, in_specs=(specs.master,), out_specs=specs.params, check_vma=False)
    return jax.jit(mapped)(master)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state, nothing allocated."""
    layout = make_layout(config, mesh)

    def leaf(dtype):
        return lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype or jnp.dtype(spec.dtype or config.model.dtype))

    params, master = (jax.tree.map(leaf(dtype), layout.specs, is_leaf=is_spec) for dtype in (None, jnp.float32))
    router, history = jax.eval_shape(lambda: (initial_router(config), empty_history(config.optim)))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(params, master, {"mu": master, "nu": master}, router, history, count, count)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, _shardings(config, mesh, layout))


def _shardings(config, mesh, layout) -> TrainState:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(config, layout), is_leaf=lambda s: isinstance(s, P))


def _initial(seed: int, name: str, spec: ParamSpec, split: Split) -> jax.Array:
    """Initial value of one parameter: a hash of the seed, its name, and the index of each element; 0 where a stage has no block."""
    rows = None if split.is_natural or spec.logical_axes[0] != "stage" else jnp.asarray(split.order)
    if spec.init == "ones":
        value = jnp.ones(spec.shape, jnp.float32)
    else:
        value = spec.std * truncated_normal([seed, zlib.crc32(name.encode())], spec.shape, rows)
    return value if rows is None else jnp.where(rows.reshape(-1, *[1] * (value.ndim - 1)) >= 0, value, 0)
