"""A mixture-of-experts layer for a Flax NNX model of your own, inside your own jit."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moejax.config import MoEConfig
from moejax.config.check import check, divides
from moejax.errors import ConfigError
from moejax.nn.moe import MoE
from moejax.nn.param import ParamSpec, is_spec, make_template
from moejax.nn.tokens import tokens_of
from moejax.ops.routing import update_bias
from moejax.parallel.rules import make_rule

_EXPERT_AXIS = "ep"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStats:
    """What the layer reports of one call, over all devices, float32; scalars but for counts.

    aux_loss: balance and router z-loss with the weights of the config, to be added to your loss. balance_loss: 1 for an even load.
    z_loss: mean squared logsumexp of the router logits.
    counts: [E], routes to each expert, before any capacity. drop_fraction: share of the routes that found no place.
    """

    aux_loss: Array
    balance_loss: Array
    z_loss: Array
    counts: Array
    drop_fraction: Array


class RouterBias(nnx.Variable):
    """Score-correction bias of a router: state, not a parameter."""


class MoELayer(nnx.Module):
    """Router, routed experts and shared experts over a mesh, or on one device.

    It opens its own shard_map: experts are split over the mesh axis `ep`, tokens over all axes. Parameters are float32 `nnx.Param`s
    whose shardings Flax knows (`nnx.get_partition_spec`); the layer computes in the dtype of its input, routers in float32.
    Call it under jit. It works under grad, checkpoint, scan and vmap; inside another shard_map only without a mesh.

    Args:
        embed_dim: size of the input's last dim.
        mesh: None runs on one device.
        init_std: standard deviation of the initial weights (normal, cut at three deviations).

    Raises:
        ValueError: if embed_dim, or later an input, is not of a kind that the layer takes.
        ConfigError: if the mesh has no axis `ep` or it does not divide the experts; for random assignment and the balance loss by
            sequence, which need to know more than tokens.
    """

    def __init__(self, embed_dim: int, config: MoEConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None, init_std: float = 0.02):
        _check(config, mesh)
        if embed_dim < 1:
            raise ValueError(f"MoELayer: embed_dim={embed_dim} is below 1")
        self.config, self.mesh = config, mesh
        axes = () if mesh is None else tuple(mesh.axis_names)
        template = make_template(lambda: MoE(embed_dim, config, init_std, expert_axis=_EXPERT_AXIS if axes else None, token_axes=axes))
        self.moe = template.bind(_initial(template.specs, rngs, mesh))
        if mesh is not None:
            for _, variable in nnx.to_flat_state(nnx.state(self.moe)):
                variable.set_metadata(out_sharding=_partition(variable.get_metadata("spec"), mesh), mesh=mesh)
        if config.router.bias_update_rate is not None:
            self.bias = RouterBias(jnp.zeros((config.num_experts,), jnp.float32))

    def __call__(
        self, x: Float[Array, "*tokens D"], *, valid: Bool[Array, "*tokens"] | None = None, dropless: bool = False
    ) -> tuple[Float[Array, "*tokens D"], LayerStats]:
        """The weighted sum of each token's experts, and statistics.

        Args:
            valid: False for padding, which no expert sees (shared experts do) and no statistic counts.
            dropless: ignore the capacity, for evaluation.
        """
        self._check_input(x, valid)
        valid = jnp.ones(x.shape[:-1], bool) if valid is None else valid
        bias = self.bias[...] if hasattr(self, "bias") else jnp.zeros((self.config.num_experts,), jnp.float32)
        graph, state = nnx.split(self.moe)

        def run(state, bias, x, valid):
            return _run(nnx.merge(graph, _cast(state, x.dtype)), self.config, bias, x, valid, dropless)

        if self.mesh is None:
            y, stats = run(state, bias, x.reshape(-1, x.shape[-1]), valid.reshape(-1))
            return y.reshape(x.shape), stats
        return _over_mesh(run, self.mesh, state, bias, x, valid)

    def _check_input(self, x: Array, valid: Array | None) -> None:
        dim = self.moe.router.w_router[...].shape[0]
        if x.shape[-1] != dim or x.size == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"MoELayer: x is {x.dtype}{list(x.shape)}; give floating-point tokens of width {dim}, one at least")
        if valid is not None and (valid.shape != x.shape[:-1] or valid.dtype != jnp.bool_):
            raise ValueError(f"MoELayer: valid is {valid.dtype}{list(valid.shape)}; give bool{list(x.shape[:-1])}, one for each token")

    def update_bias(self, counts: Float[Array, " E"]) -> None:
        """Balance without a loss: move the bias against the counts of a step, by router.bias_update_rate of the config."""
        rate = self.config.router.bias_update_rate
        if rate is None:
            raise ConfigError("model.moe.router.bias_update_rate=None leaves nothing to update; give a rate such as 0.001")
        self.bias[...] = update_bias(self.bias[...][None], counts[None], rate)[0]


def _over_mesh(run, mesh: Mesh, state, bias, x, valid):
    """`run` in a shard_map, with tokens split evenly over all axes, filled up with padding."""
    split, count = P(mesh.axis_names), valid.size

    def on_automatic_axes(state, bias, x, valid):
        padding = -count % mesh.size
        mapped = jax.shard_map(
            run,
            mesh=jax.sharding.get_abstract_mesh() if is_explicit else mesh,
            in_specs=(nnx.get_partition_spec(state), P(), split, split),
            out_specs=(split, P()),
            check_vma=False,
        )
        flat = jnp.pad(x.reshape(count, -1), ((0, padding), (0, 0)))
        y, stats = mapped(state, bias, flat, jnp.pad(valid.reshape(count), (0, padding)))
        return y[:count].reshape(x.shape), stats

    is_explicit = AxisType.Explicit in mesh.axis_types
    if not is_explicit:
        return on_automatic_axes(state, bias, x, valid)
    shardings = NamedSharding(mesh, jax.typeof(x).sharding.spec), NamedSharding(mesh, P())
    over_explicit_axes: Any = jax.sharding.auto_axes(on_automatic_axes, out_sharding=shardings)
    return over_explicit_axes(state, bias, x, valid)


def _run(moe: MoE, config: MoEConfig, bias, x, valid, dropless):
    """The layer on one device's tokens; statistics are summed over all."""
    axes = moe.token_axes
    rank = lax.axis_index(axes) if axes else 0
    segment = valid.astype(jnp.int32)[None]
    tokens = tokens_of(segment, jnp.zeros_like(segment), first_row=rank, seed=0, step=jnp.int32(0))
    y, stats = moe(x[None], tokens, bias, jnp.int32(0), dropless=dropless)
    total, stats = lax.psum((valid.sum(dtype=jnp.float32), stats), axes)
    balance_loss, z_loss = (part / jnp.maximum(total, 1) for part in (stats.balance_loss, stats.z_loss))
    return y[0], LayerStats(
        aux_loss=config.router.balance_loss_weight * balance_loss + config.router.z_loss_weight * z_loss,
        balance_loss=balance_loss,
        z_loss=z_loss,
        counts=stats.counts,
        drop_fraction=stats.traffic.dropped / jnp.maximum(stats.traffic.routes, 1),
    )


def _check(config: MoEConfig, mesh: Mesh | None) -> None:
    router = config.router
    check(
        router.assignment != "random",
        "model.moe.router.assignment=random draws anew in each step of a training run, which this layer does not know; "
        "use learned or uniform",
    )
    check(
        router.balance_loss != "instance",
        "model.moe.router.balance_loss=instance needs whole sequences, and this layer sees tokens; use local or global",
    )
    if mesh is not None:
        check(
            _EXPERT_AXIS in mesh.axis_names,
            f"the mesh has axes {', '.join(mesh.axis_names)}, and experts are split over an axis named ep; add it, of size 1 at least",
        )
        divides(f"mesh axis {_EXPERT_AXIS}", mesh.shape[_EXPERT_AXIS], "model.moe.num_experts", config.num_experts)


def _partition(spec: ParamSpec, mesh: Mesh) -> P:
    return make_rule(spec.shape, spec.logical_axes, mesh.shape).param


def _initial(specs: dict, rngs: nnx.Rngs, mesh: Mesh | None) -> dict:
    """Initial float32 arrays, made on the devices that keep them."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)

    def build(key):
        keys = jax.random.split(key, len(leaves))
        arrays = [spec.std * jax.random.truncated_normal(k, -3.0, 3.0, spec.shape) for spec, k in zip(leaves, keys, strict=True)]
        return structure.unflatten(arrays)

    shardings = None if mesh is None else structure.unflatten([NamedSharding(mesh, _partition(spec, mesh)) for spec in leaves])
    return jax.jit(build, out_shardings=shardings)(rngs.params())


def _cast(state, dtype):
    """Weights in the compute dtype, but for those that are declared float32."""
    return jax.tree.map(
        lambda v: v.replace(v[...].astype(v.get_metadata("spec").dtype or dtype)), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
