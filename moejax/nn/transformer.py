"""The whole model as functions of a nested dict of parameters: embed, scanned stacks of blocks, head."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.config import ModelConfig
from moejax.nn.attention import Cache
from moejax.nn.block import Block, Layer
from moejax.nn.ends import Embedding, Head
from moejax.nn.moe import MoEStats
from moejax.nn.param import Template, is_spec, make_template
from moejax.nn.tokens import Tokens


class Output(NamedTuple):
    """Sums over this device's tokens, float32 scalars, and the router statistics of the MoE layers stacked over layers."""

    loss_sum: Array
    z_sum: Array
    moe: MoEStats | None


class Transformer:
    """A model without arrays. Parameters are a dict: embed, dense_blocks and moe_blocks (stacked over layers), head."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self._ends = {"embed": make_template(lambda: Embedding(config)), "head": make_template(lambda: Head(config))}
        self._stacks: dict[str, tuple[Template, int]] = {}
        if config.num_dense_layers:
            self._stacks["dense_blocks"] = make_template(lambda: Block(config, is_moe=False)), config.num_dense_layers
        if config.num_moe_layers:
            self._stacks["moe_blocks"] = make_template(lambda: Block(config, is_moe=True)), config.num_moe_layers

    @property
    def specs(self) -> dict:
        """Declarations of all parameters, ParamSpec leaves with global shapes."""
        ends = {name: template.specs for name, template in self._ends.items()}
        stacks = {
            name: jax.tree.map(lambda spec, n=count: spec.stacked(n), template.specs, is_leaf=is_spec)
            for name, (template, count) in self._stacks.items()
        }
        return ends | stacks

    def embed(self, params: dict, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        with jax.named_scope("embed"):
            return self._ends["embed"].bind(params["embed"])(ids)

    def blocks(
        self,
        params: dict,
        router: dict,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        *,
        dropless: bool,
        caches: dict[str, Cache] | None = None,
        max_window: int | None = None,
    ) -> tuple[Float[Array, "B T D"], MoEStats | None, dict[str, Cache] | None]:
        """Run all blocks, one scan per stack.

        Args:
            router: {"bias": float32 [MoE layers, E]}, or {} without MoE layers.
            dropless: ignore the capacity.
            caches: for each stack, keys and values stacked over layers.
            max_window: no layer attends further back than this many tokens.
        """
        first, moe_stats, new_caches = 0, None, {}
        for name, (template, count) in self._stacks.items():
            layers = self._layers(first, count, router["bias"] if name == "moe_blocks" else None, max_window)

            def run(x, layer_arrays, template=template):
                arrays, layer, cache = layer_arrays
                x, stats, cache = template.bind(arrays)(x, tokens, layer, dropless=dropless, cache=cache)
                return x, (stats, cache)

            if self.config.recompute == "block" and caches is None:
                run = jax.checkpoint(run)
            cache = None if caches is None else caches[name]
            with jax.named_scope(name):
                x, (stats, cache) = lax.scan(run, x, (params[name], layers, cache))
            moe_stats = stats if name == "moe_blocks" else moe_stats
            new_caches[name] = cache
            first += count
        return x, moe_stats, None if caches is None else new_caches

    def loss(
        self, params: dict, router: dict, ids: Int[Array, "B T"], labels: Int[Array, "B T"], tokens: Tokens, *, dropless: bool
    ) -> Output:
        """Loss sums of one microbatch."""
        x, stats, _ = self.blocks(params, router, self.embed(params, ids), tokens, dropless=dropless)
        with jax.named_scope("head"):
            head = self._ends["head"].bind(params["head"])
            loss_sum, z_sum = head.loss(x, labels, params["embed"]["w_embed"])
        return Output(loss_sum, z_sum, stats)

    def logits(self, params: dict, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 logits from the last block's output."""
        return self._ends["head"].bind(params["head"]).logits(x, params["embed"]["w_embed"])

    def empty_caches(self, batch: int, places: int, dtype: jnp.dtype) -> dict[str, Cache]:
        """Zero keys and values for generation, stacked over the layers of each stack."""
        shape = (batch, places, self.config.attention.kv_heads, self.config.head_dim)
        return {name: {key: jnp.zeros((count, *shape), dtype) for key in ("k", "v")} for name, (_, count) in self._stacks.items()}

    def _layers(self, first: int, count: int, bias: Array | None, max_window: int | None) -> Layer:
        index = jnp.arange(first, first + count, dtype=jnp.int32)
        window = jnp.array([self.config.window(first + i) for i in range(count)], jnp.int32)
        if max_window is not None:
            window = jnp.where((window <= 0) | (window > max_window), max_window, window)
        return Layer(index, window, bias)
