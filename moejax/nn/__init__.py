"""Flax NNX modules of the model. Parameters live outside, in nested plain dicts."""

from moejax.nn.attention import Cache
from moejax.nn.layers import Layers, forward
from moejax.nn.moe import MoEStats
from moejax.nn.moe_layer import LayerStats, MoELayer
from moejax.nn.param import ParamSpec, is_spec
from moejax.nn.tokens import Tokens, tokens_of
from moejax.nn.transformer import STACKS, Output, Rows, Transformer

__all__ = [
    "STACKS",
    "Cache",
    "LayerStats",
    "Layers",
    "MoELayer",
    "MoEStats",
    "Output",
    "ParamSpec",
    "Rows",
    "Tokens",
    "Transformer",
    "forward",
    "is_spec",
    "tokens_of",
]
