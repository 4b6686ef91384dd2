"""One transformer block: attention and a feed-forward branch, dense or mixture of experts."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.config import ModelConfig
from moejax.nn.attention import Attention, Cache
from moejax.nn.mlp import Mlp
from moejax.nn.moe import MoE, RunExperts
from moejax.nn.norm import RMSNorm
from moejax.nn.tokens import Tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """What differs between the layers of a stack beside their weights; scanned along with them.

    index: int32, depth in the whole model.
    bias: float32 [E], score-correction bias of the router; None in dense blocks.
    """

    index: Array
    bias: Array | None = None


class Block(nnx.Module):
    """x + branch(x) twice, with norms before the branches (pre), after them (post), or both (peri)."""

    def __init__(self, config: ModelConfig, *, is_moe: bool):
        dim, eps = config.embed_dim, config.norm_eps
        self.attention = Attention(config)
        if config.norm_placement in ("pre", "peri"):
            self.attention_norm_in, self.ffn_norm_in = RMSNorm(dim, eps), RMSNorm(dim, eps)
        if config.norm_placement in ("post", "peri"):
            self.attention_norm_out, self.ffn_norm_out = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.placement = config.norm_placement
        if is_moe:
            assert config.moe is not None
            self.moe = MoE(dim, config.moe, config.init_std)
        else:
            self.mlp = Mlp(config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        layer: Layer,
        window: jax.Array | int,
        *,
        dropless: bool,
        kernel: Literal["xla", "cudnn"] = "xla",
        cache: Cache | None = None,
        run_experts: RunExperts | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, Cache | None]:
        """The block's output, its MoEStats (None if dense) and the updated cache (None without one).

        Window, kernel and cache are those of `Attention`, run_experts that of `MoE`.
        """
        x = checkpoint_name(x, "block_in")
        before, after = self.placement in ("pre", "peri"), self.placement in ("post", "peri")
        with jax.named_scope("attention"):
            y, cache = self.attention(self.attention_norm_in(x) if before else x, tokens, window, kernel=kernel, cache=cache)
            x = x + (self.attention_norm_out(y) if after else y)
        with jax.named_scope("ffn"):
            h = self.ffn_norm_in(x) if before else x
            stats = None
            if layer.bias is None:
                y = self.mlp(h)
            else:
                y, stats = self.moe(h, tokens, layer.bias, layer.index, dropless=dropless, run_experts=run_experts)
            x = x + (self.ffn_norm_out(y) if after else y)
        return x, stats, cache
