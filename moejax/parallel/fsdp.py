"""Weights that are kept as shards and gathered where they are used: fully sharded data parallelism, ZeRO stage 3.

The baseline that resident weights are measured against. Every microbatch gathers each layer's weights twice, forward and backward,
and reduce-scatters their gradients in the compute dtype, layer by layer.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.parallel.mesh import AXES

MARK = "dp"
"""Mesh axis that every gather of weights names, of size 1 too, and no transport of rows: recomputation tells them apart by it."""

GATHERED = "gathered_weight"
"""Name of gathered weights for recomputation: they are gathered again in the backward pass, never kept."""


def gather_weights(arrays: dict, rules: dict, *, is_stacked: bool) -> dict:
    """Whole weights of one layer from this device's shards. The gradient of each is reduce-scattered by the transpose.

    Args:
        is_stacked: whether the rules are for a stack of layers, with a leading dim that `arrays` do not have.
    """
    leaves, structure = jax.tree.flatten(arrays)

    def whole(value, rule):
        if not rule.is_gathered:
            return value
        axes = tuple(axis for axis in AXES if axis in rule.axes or axis == MARK)
        return checkpoint_name(lax.all_gather(value, axes, axis=rule.dim - is_stacked, tiled=True), GATHERED)

    return structure.unflatten([whole(*pair) for pair in zip(leaves, structure.flatten_up_to(rules), strict=True)])
