"""The attention module, and the choice of its kernel."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.nn.norm import RMSNorm
from moejax.nn.param import param
from moejax.nn.tokens import Tokens
from moejax.ops.rope import rope
from moejax_kernels.attention import Choice, Places, attention, choose_implementation

Cache = dict[str, jax.Array]
"""Keys and values of the places filled so far: k, v [B, S, K, H]."""


class Attention(nnx.Module):
    """Grouped-query attention with rotary embedding; optional query and key norm, window, and document masks."""

    def __init__(self, config: ModelConfig):
        c = config.attention
        dim, heads, kv_heads, head_dim, std = config.embed_dim, c.num_heads, c.kv_heads, config.head_dim, config.init_std
        self.theta, self.qk_norm = c.rope_theta, c.qk_norm
        self.w_q = param(dim, heads, head_dim, axes=("embed", "heads", "head_dim"), std=std)
        self.w_k = param(dim, kv_heads, head_dim, axes=("embed", "kv_heads", "head_dim"), std=std)
        self.w_v = param(dim, kv_heads, head_dim, axes=("embed", "kv_heads", "head_dim"), std=std)
        self.w_o = param(heads, head_dim, dim, axes=("heads", "head_dim", "embed"), std=std)
        if c.qk_norm != "none":
            whole = c.qk_norm == "width"
            self.q_norm = RMSNorm(heads * head_dim if whole else head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_heads * head_dim if whole else head_dim, config.norm_eps)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        window: jax.Array | int,
        *,
        kernel: Literal["xla", "cudnn"] = "xla",
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Attend within the sequence, or, with a cache, to it as well: new keys are written at the tokens' places.

        Args:
            window: tokens that a query sees, itself included; <= 0 for all. cudnn needs a number, xla takes an int32 scalar too.
            kernel: as `choose_attention` gives it; xla with a cache.
        """
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[...]) for w in (self.w_q, self.w_k, self.w_v))
        if self.qk_norm != "none":
            q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        q, k = rope(q, tokens.position, theta=self.theta), rope(k, tokens.position, theta=self.theta)
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        query = key = Places(tokens.place, tokens.segment)
        if cache is not None:
            start = (0, tokens.place[0, 0], 0, 0)
            k = lax.dynamic_update_slice(cache["k"], k.astype(cache["k"].dtype), start)
            v = lax.dynamic_update_slice(cache["v"], v.astype(cache["v"].dtype), start)
            cache = {"k": k, "v": v}
            place = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32)[None, :], k.shape[:2])
            key = Places(place, jnp.ones_like(place))  # a cache holds one document
        y = attention(q, k, v, query, key, window=window, implementation=kernel, max_documents=tokens.max_documents)
        return jnp.einsum("btnh,nhd->btd", y, self.w_o[...]), cache

    def _normalised(self, x, norm):
        if self.qk_norm == "head":
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def choose_attention(config: ModelConfig) -> Choice:
    """The kernel behind model.attention.implementation on the device that is being traced for, and why.

    Raises:
        ConfigError: if the named kernel does not run there, or not with this dtype or width of heads.
    """
    name = config.attention.implementation
    try:
        return choose_implementation(name, dtype=config.dtype, head_dim=config.head_dim)
    except NotImplementedError as error:
        settings = f"model.dtype={config.dtype} and heads of {config.head_dim}"
        raise ConfigError(f"model.attention.implementation={name} with {settings}: {error}") from error
