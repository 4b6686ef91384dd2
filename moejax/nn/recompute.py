"""Which intermediate results of a block are kept for the backward pass, which are computed again, and which wait in host memory.

Results carry names (`checkpoint_name` where they are made; `moejax.config.RESIDUALS` lists them). Routing is kept in every mode: it is
small, and a choice that was made twice could come out twice (ties), so tokens never travel to other experts in the backward pass.
"""

from collections import Counter
from collections.abc import Callable

import jax
from jax import checkpoint_policies as policies
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.ops.routing import ROUTING
from moejax.parallel.fsdp import GATHERED, MARK

_HOST = "pinned_host"


def recomputed(block: Callable, config: ModelConfig, *, num_layers: int, is_gathered: bool) -> Callable:
    """The block of a loop over layers with model.recompute applied.

    Weights that were gathered (fsdp) are never kept.
    """
    if config.recompute == "none" and not is_gathered:
        return block
    # Forward and backward are two loops, so XLA cannot merge what is computed twice; but it unrolls a loop of one layer.
    return jax.checkpoint(block, policy=_policy(config), prevent_cse=num_layers == 1)


def _policy(config: ModelConfig) -> Callable:
    names = config.kept_residuals
    if config.recompute == "none":
        return _all_but_weights
    if config.recompute == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[ROUTING], names_which_can_be_offloaded=list(names), offload_src="device", offload_dst=_HOST
        )
    return policies.save_only_these_names(ROUTING, *names)


def _all_but_weights(primitive, *avals, **params) -> bool:
    """Whether a result is kept when weights alone are not.

    They are refused by name and where they are made, or what the name is given would be kept. JAX's save_anything_except_these_names keeps
    everything.
    """
    if primitive.name == "all_gather":
        return MARK not in params["axis_name"]
    return params.get("name") != GATHERED


def describe_offload(config: ModelConfig, jaxpr: ClosedJaxpr) -> str:
    """One line on what a traced step of a model with recompute=offload sends to host memory.

    Raises:
        ConfigError: if a result that was named is needed by nobody, so that offloading it would do nothing.
    """
    moved = offloaded_bytes(jaxpr)
    for name in config.kept_residuals:
        if not moved.get(name):
            raise ConfigError(
                f"model.recompute_keep={config.kept_residuals} holds {name!r}, which the backward pass of this model does not need; "
                "leave it out"
            )
    parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in moved.items())
    return f"offload    {sum(moved.values()) / 2**20:.1f} MiB to host memory and back in each step and device: {parts}"


def offloaded_bytes(jaxpr: ClosedJaxpr) -> dict[str, int]:
    """Bytes that each named result sends to host memory in one run of a traced program, per device; they come back once."""
    found: Counter[str] = Counter()
    _count(jaxpr.jaxpr, 1, found)
    return dict(found)


def _count(jaxpr, times: int, found: Counter) -> None:
    names = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            names[eqn.outvars[0]] = eqn.params["name"]
        elif eqn.primitive.name == "device_put":
            for var, target in zip(eqn.invars, eqn.params["devices"], strict=True):
                if "host" in str(target).lower() and not isinstance(var, Literal):
                    found[names.get(var, "unnamed")] += times * var.aval.size * var.aval.dtype.itemsize
        runs = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for inner in _inner(eqn):
            _count(inner, runs, found)


def _inner(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
