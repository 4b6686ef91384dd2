"""Which parameters get which learning rate and weight decay."""

import fnmatch
from dataclasses import dataclass

import jax

from moejax.config import OptimConfig
from moejax.errors import ConfigError

_ROUTED_EXPERTS = "*.moe.experts.*"


@dataclass(frozen=True)
class Group:
    """Optimizer settings of one parameter: factor on the learning rate, and decoupled weight decay."""

    lr_scale: float
    weight_decay: float


def parameter_groups(config: OptimConfig, params: dict) -> dict:
    """A Group for each leaf of a parameter tree, by its dotted name (such as moe_blocks.moe.experts.w_in).

    Raises:
        ConfigError: if a glob of optim.no_decay matches no parameter.
    """
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    for glob in config.no_decay:
        if not fnmatch.filter(names, glob):
            raise ConfigError(
                f"optim.no_decay holds {glob!r}, which matches no parameter; mend the glob or remove it. "
                f"Parameters: {', '.join(sorted(names))}"
            )

    def group(path, _):
        name = path_name(path)
        is_expert = fnmatch.fnmatch(name, _ROUTED_EXPERTS)
        decay = config.weight_decay
        if is_expert and config.expert_weight_decay is not None:
            decay = config.expert_weight_decay
        if any(fnmatch.fnmatch(name, glob) for glob in config.no_decay):
            decay = 0.0
        return Group(config.expert_lr_scale if is_expert else 1.0, decay)

    return jax.tree_util.tree_map_with_path(group, params)


def path_name(path: tuple) -> str:
    """The dotted name of a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
