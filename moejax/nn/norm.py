"""The norm module."""

from flax import nnx
from jaxtyping import Array, Float

from moejax.nn.param import param
from moejax.ops.norm import rms_norm


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dim, with a float32 gain."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.scale = param(dim, axes=("norm",), init="ones", dtype="float32")

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale[...], eps=self.eps)
