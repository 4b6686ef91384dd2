"""The whole model as functions of a nested dict of parameters: embed, scanned stacks of blocks, head."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.nn.attention import Cache, choose_attention
from moejax.nn.block import Block, Layer
from moejax.nn.ends import Embedding, Head
from moejax.nn.moe import MoEStats
from moejax.nn.param import Template, is_spec, make_template
from moejax.nn.recompute import recomputed
from moejax.nn.segments import scan_segments
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
        return self.stack("dense_blocks", params["dense_blocks"], {}, x, tokens, dropless=dropless)[0]

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
        moe_stats, new_caches = None, {}
        for name in self._stacks:
            cache = None if caches is None else caches[name]
            run = self.stack(name, params[name], router, x, tokens, dropless=dropless, cache=cache, max_window=max_window)
            x, stats, new_caches[name] = run
            moe_stats = stats if name == "moe_blocks" else moe_stats
        return x, moe_stats, None if caches is None else new_caches

    def stack(
        self,
        name: str,
        arrays: dict,
        router: dict,
        x: Float[Array, "B T D"],
        tokens: Tokens,
        *,
        dropless: bool,
        rank: Int[Array, ""] | int = 0,
        cache: Cache | None = None,
        max_window: int | None = None,
    ) -> tuple[Float[Array, "B T D"], MoEStats | None, Cache | None]:
        """Run the blocks of one stack, or those of them that are here.

        Args:
            name: one of STACKS. arrays: its parameters.
            router: {"bias": float32 [blocks here, E]} for MoE blocks.
            rank: pipeline rank of this device; those before it have as many blocks of the stack each.
        """
        template, count = self._stacks[name][0], len(jax.tree.leaves(arrays)[0])
        kernel = "xla" if cache is not None else choose_attention(self.config).name
        skipped = rank * count
        first = self._first(name) + skipped
        layers = Layer(first + jnp.arange(count, dtype=jnp.int32), router["bias"] if name == "moe_blocks" else None)

        def block(x, read, layer, window, cache):
            module = template.bind(self._gather(name, read()))
            x, stats, cache = module(x, tokens, layer, window, dropless=dropless, kernel=kernel, cache=cache)
            return x, (stats, cache)

        with jax.named_scope(name):
            scan = self._scan if kernel == "xla" else self._scan_static
            x, (stats, cache) = scan(block, x, arrays, layers, self._windows(name, skipped, count, max_window), cache)
        return x, stats, cache

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

    def _scan(self, block, x, stack, layers, windows, cache):
        """One loop over all layers; windows are an array, as the layers' other differences."""

        def run(x, scanned):
            arrays, *rest = scanned
            return block(x, lambda: arrays, *rest)

        if cache is None:
            run = recomputed(run, self.config, num_layers=len(windows), is_gathered=self._is_gathered)
        return lax.scan(run, x, (stack, layers, jnp.asarray(windows, jnp.int32), cache))

    def _scan_static(self, block, x, stack, layers, windows, cache):
        """As few loops as windows that the kernel must know allow."""
        if not isinstance(windows, tuple):
            raise ConfigError(
                f"model.attention.window_pattern={self.config.attention.window_pattern} gives pipeline stages different windows, which "
                "model.attention.implementation=cudnn cannot have in one program; use xla, one window, or mesh.pp=1"
            )
        windows = tuple(window if window < x.shape[1] else -1 for window in windows)
        is_read_again = self._is_gathered or len(set(windows)) > 1

        def make_block(window, repeats):
            return recomputed(partial(block, window=window, cache=cache), self.config, num_layers=repeats, is_gathered=is_read_again)

        return scan_segments(make_block, x, stack, layers, windows)

    def _first(self, name: str) -> int:
        """Depth of a stack's first block."""
        return 0 if name == "dense_blocks" else self.config.num_dense_layers

    def _windows(self, name: str, skipped: Array | int, count: int, max_window: int | None) -> tuple[int, ...] | Array:
        """Window of each block here: numbers, or an array if they depend on the pipeline rank."""
        first, whole = self._first(name), self._stacks[name][1]
        windows = tuple(self._window(layer, max_window) for layer in range(first, first + whole))
        if isinstance(skipped, int):
            return windows[skipped : skipped + count]
        return windows[:count] if len(set(windows)) == 1 else lax.dynamic_slice_in_dim(jnp.array(windows, jnp.int32), skipped, count)

    def _window(self, layer: int, max_window: int | None) -> int:
        """Window of a layer in tokens, -1 for full attention."""
        window = self.config.window(layer)
        if max_window is None:
            return window
        return min(window, max_window) if window > 0 else max_window
