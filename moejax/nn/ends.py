"""The two ends of the model: token embedding and language-model head."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moejax.config import ModelConfig
from moejax.nn.norm import RMSNorm
from moejax.nn.param import param
from moejax.ops.cross_entropy import cross_entropy


class Embedding(nnx.Module):
    """Token embedding, with an optional factor and norm."""

    def __init__(self, config: ModelConfig):
        self.scale = config.embed_scale
        self.w_embed = param(config.vocab_size, config.embed_dim, axes=("vocab", "embed"), std=config.init_std)
        self.norm = RMSNorm(config.embed_dim, config.norm_eps) if config.embed_norm else None

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.w_embed[...][ids]
        if self.scale is not None:
            x = (x * self.scale).astype(x.dtype)
        return x if self.norm is None else self.norm(x)


class Head(nnx.Module):
    """Final norm and projection to the vocabulary; tied heads get the embedding's weights from outside."""

    def __init__(self, config: ModelConfig):
        self.chunk = config.loss_chunk
        self.norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.w_head = (
            None if config.tie_embeddings else param(config.embed_dim, config.vocab_size, axes=("embed", "vocab"), std=config.init_std)
        )

    def loss(
        self, x: Float[Array, "B T D"], labels: Int[Array, "B T"], w_embed: Float[Array, "V D"] | None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sums over labelled places (label >= 0) of the negative log likelihood, and of logsumexp^2."""
        flat = labels.reshape(-1)
        nll, lse = cross_entropy(self.norm(x).reshape(flat.size, -1), self._weights(w_embed), flat, chunk=self.chunk)
        labelled = flat >= 0
        return jnp.where(labelled, nll, 0.0).sum(), jnp.where(labelled, lse**2, 0.0).sum()

    def logits(self, x: Float[Array, "*batch D"], w_embed: Float[Array, "V D"] | None) -> Float[Array, "*batch V"]:
        """Float32 logits of a few places, for generation."""
        return jnp.matmul(self.norm(x), self._weights(w_embed), preferred_element_type=jnp.float32)

    def _weights(self, w_embed):
        return w_embed.T if self.w_head is None else self.w_head[...]
