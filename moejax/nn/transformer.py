"""The whole model as functions of a nested dict of parameters: embed, scanned stacks of blocks, head."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.nn.attention import Cache, choose_attention
from moejax.nn.block import Block, Layer
from moejax.nn.ends import Embedding, Head
from moejax.nn.layers import Layers, forward
from moejax.nn.moe import MoEStats, RunExperts
from moejax.nn.param import Template, is_spec, make_template
from moejax.nn.recompute import recomputed
from moejax.nn.tokens import Tokens

STACKS = ("dense_blocks", "moe_blocks")
"""Parts of the parameters that are stacked over layers, in the order in which they run."""

_STACK_AXIS = {"dense_blocks": "layer", "moe_blocks": "stage"}
"""Logical name of a stack's leading dim: MoE blocks are split over pipeline stages."""


class Output(NamedTuple):
    """Sums over this device's tokens, float32 scalars, and the router statistics of the MoE layers stacked over layers."""

    loss_sum: Array
    z_sum: Array
    moe: MoEStats | None


class Rows(NamedTuple):
    """Blocks of a stack in the order in which they run.

    places: int32 [L], index into the arrays here. depths: int32 [L], index in the model; below 0 there is no block: its weights are zero.
    known_depths: blocks whose windows are theirs, as numbers, for kernels that have to know windows; None if they depend on the rank.
    is_padded: whether a depth may be below 0.
    """

    places: Array
    depths: Array
    known_depths: tuple[int, ...] | None
    is_padded: bool


class Transformer:
    """A model without arrays. Parameters are a dict: embed, dense_blocks and moe_blocks (stacked over layers), head.

    Args:
        gather: (name of the part, its arrays; of one layer if stacked) -> whole arrays, for parameters that are kept as shards.
    """

    def __init__(self, config: ModelConfig, gather: Callable[[str, dict], dict] | None = None):
        self.config = config
        self._is_gathered = gather is not None
        self._gather = gather or (lambda name, arrays: arrays)
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
            name: jax.tree.map(lambda spec, n=count, axis=_STACK_AXIS[name]: spec.stacked(n, axis), template.specs, is_leaf=is_spec)
            for name, (template, count) in self._stacks.items()
        }
        return ends | stacks

    def embed(self, params: dict, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        with jax.named_scope("embed"):
            return self._end("embed", params)(ids)

    def prologue(self, params: dict, ids: Int[Array, "B T"], tokens: Tokens, *, dropless: bool) -> Float[Array, "B T D"]:
        """What comes before the MoE blocks: embedding and dense blocks."""
        x = self.embed(params, ids)
        if "dense_blocks" not in self._stacks:
            return x
        return forward(self.layers("dense_blocks", params["dense_blocks"], {}, tokens, dropless=dropless), x)[0]

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
        run_experts: RunExperts | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Cache] | None]:
        """Run all blocks, stack after stack.

        Args:
            router: {"bias": float32 [MoE layers, E]}, or {} without MoE layers.
            dropless: ignore the capacity.
            caches: for each stack, keys and values stacked over layers.
            max_window: no layer attends further back than this many tokens.
            run_experts: takes the place of expert parallelism, and its reports that of the statistics.
        """
        moe_stats, new_caches = None, {}
        for name in self._stacks:
            cache = None if caches is None else caches[name]
            how = {"dropless": dropless, "cache": cache, "max_window": max_window, "run_experts": run_experts}
            run = self.layers(name, params[name], router, tokens, **how)
            x, (stats, new_caches[name]) = forward(run, x)
            moe_stats = stats if name == "moe_blocks" else moe_stats
        return x, moe_stats, None if caches is None else new_caches

    def layers(
        self,
        name: str,
        arrays: dict,
        router: dict,
        tokens: Tokens,
        *,
        dropless: bool,
        rows: Rows | None = None,
        scalar: Callable[[MoEStats | None], Array] = lambda stats: jnp.float32(0),
        cache: Cache | None = None,
        max_window: int | None = None,
        run_experts: RunExperts | None = None,
    ) -> Layers:
        """Blocks of a stack, to be run by `moejax.nn.layers`; each reports (router statistics or None, updated cache or None).

        Args:
            name: one of STACKS. arrays: its parameters.
            router: {"bias": float32 [blocks here, E]} for MoE blocks.
            rows: which blocks; None for all of the stack.
            scalar: a layer's part of the loss beside what its output does to it.
            cache, max_window, run_experts: as in `blocks`.
        """
        template, count = self._stacks[name]
        if rows is None:
            first = 0 if name == "dense_blocks" else self.config.num_dense_layers
            depths = np.arange(first, first + count, dtype=np.int32)
            rows = Rows(jnp.arange(count, dtype=jnp.int32), jnp.asarray(depths), tuple(depths.tolist()), is_padded=False)
        kernel = "xla" if cache is not None else choose_attention(self.config).name
        bias = router["bias"][rows.places] if name == "moe_blocks" else None
        numbers = Layer(rows.depths, bias), self._traced_windows(rows, max_window), cache
        windows = (None,) * len(rows.places) if kernel == "xla" else self._known_windows(rows, tokens.place.shape[1])

        def block(weights, x, numbers, tokens, known):
            layer, window, cache = numbers
            is_real = layer.index >= 0
            if rows.is_padded:  # padding is routed nowhere and counted nowhere
                tokens = dataclasses.replace(tokens, segment=jnp.where(is_real, tokens.segment, 0))
            module = template.bind(self._gather(name, weights))
            how = {"dropless": dropless, "kernel": kernel, "cache": cache, "run_experts": run_experts}
            y, stats, cache = module(x, tokens, layer, window if known is None else known, **how)
            y = jnp.where(is_real, y, x) if rows.is_padded else y
            return (y, scalar(stats)), (stats, cache)

        def make_block(known, repeats):
            run = partial(block, known=known)
            return run if cache is not None else recomputed(run, self.config, num_layers=repeats, is_gathered=self._is_gathered)

        return Layers(name, make_block, arrays, rows.places, numbers, tokens, windows)

    def loss(
        self, params: dict, router: dict, ids: Int[Array, "B T"], labels: Int[Array, "B T"], tokens: Tokens, *, dropless: bool
    ) -> Output:
        """Loss sums of one microbatch."""
        x, stats, _ = self.blocks(params, router, self.embed(params, ids), tokens, dropless=dropless)
        return Output(*self.head_loss(params, x, labels), stats)

    def head_loss(self, params: dict, x: Float[Array, "B T D"], labels: Int[Array, "B T"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sums over labelled places of the negative log likelihood, and of logsumexp^2."""
        with jax.named_scope("head"):
            return self._end("head", params).loss(x, labels, self._tied(params))

    def logits(self, params: dict, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Float32 logits from the last block's output."""
        return self._end("head", params).logits(x, self._tied(params))

    def empty_caches(self, batch: int, places: int, dtype: jnp.dtype) -> dict[str, Cache]:
        """Zero keys and values for generation, stacked over the layers of each stack."""
        shape = (batch, places, self.config.attention.kv_heads, self.config.head_dim)
        return {name: {key: jnp.zeros((count, *shape), dtype) for key in ("k", "v")} for name, (_, count) in self._stacks.items()}

    def _end(self, name: str, params: dict) -> Any:
        return self._ends[name].bind(self._gather(name, params[name]))

    def _tied(self, params: dict) -> Array | None:
        return self._gather("embed", params["embed"])["w_embed"] if self.config.tie_embeddings else None

    def _traced_windows(self, rows: Rows, max_window: int | None) -> Array:
        """Window of each block, int32; of padding any."""
        whole = [self._window(layer, max_window) for layer in range(self.config.num_layers)]
        return jnp.asarray(whole, jnp.int32)[jnp.maximum(rows.depths, 0)]

    def _known_windows(self, rows: Rows, length: int) -> tuple[int, ...]:
        """The same for a kernel that has to know them; a window that no token sees the end of is none."""
        if rows.known_depths is None:
            raise ConfigError(
                f"model.attention.window_pattern={self.config.attention.window_pattern} gives pipeline stages different windows, which "
                "model.attention.implementation=cudnn cannot have in one program; use xla, one window, or mesh.pp=1"
            )
        windows = (self._window(depth, None) for depth in rows.known_depths)
        return tuple(window if window < length else -1 for window in windows)

    def _window(self, layer: int, max_window: int | None) -> int:
        """Window of a layer in tokens, -1 for full attention."""
        window = self.config.window(layer)
        if max_window is None:
            return window
        return min(window, max_window) if window > 0 else max_window
