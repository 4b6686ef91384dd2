"""A config of any size made so small that this machine runs it in seconds, with everything kept that changes what the program does."""

import dataclasses
import math

from moejax.config import AttentionConfig, DataConfig, EvalConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig

BATCH, LENGTH = 16, 16
"""Sequences of a step, and tokens of each."""

_BLOCKS = 8  # MoE blocks at most: two for each of four ranks
_HEAD_DIM = 8
_LEAST_WEIGHT = 0.1  # of losses: with a smaller one an error in their gradients would drown in rounding


def shrink(config: TrainConfig) -> TrainConfig:
    """The same program with small numbers, in float32, on one device.

    Kept: how many dense blocks come first (two at most) and whether MoE blocks divide over the mesh's stages; heads to a key; which windows
    end inside a sequence; which numbers of ranks divide the experts; shared experts (two at most); every choice of router, norm, loss and
    capacity. Weights of losses that are on are at least 0.1. Not kept: precision below float32, optimizer, data.
    """
    model = config.model
    blocks = _blocks(model.num_moe_layers, config.mesh.pp * config.mesh.virtual_stages)
    dense = min(model.num_dense_layers, 2)
    attention = _attention(model.attention, config.data.seq_len)
    small = dataclasses.replace(
        model,
        vocab_size=64 if model.vocab_size % 8 == 0 else 61,
        embed_dim=_width(model, attention),
        num_layers=dense + blocks,
        num_dense_layers=dense,
        mlp_dim=20 if dense else 0,
        attention=attention,
        moe=None if model.moe is None else _experts(model.moe),
        z_loss_weight=_visible(model.z_loss_weight),
        loss_chunk=24 if model.loss_chunk < model.vocab_size else 64,
        init_std=0.02,
        dtype="float32",
        precision="plain",
        recompute="none",
        recompute_keep=(),
    )
    return TrainConfig(
        name="verify",
        steps=10,
        batch_size=BATCH,
        seed=config.seed,
        model=small,
        mesh=MeshConfig(),
        data=DataConfig(source="synthetic", seq_len=LENGTH, document_mask=config.data.document_mask),
        optim=OptimConfig(),
        eval=EvalConfig(every=None),
    )


def _blocks(count: int, stages: int) -> int:
    if count <= _BLOCKS:
        return count
    return _BLOCKS if count % max(stages, 4) == 0 else _BLOCKS - 1


def _attention(attention: AttentionConfig, length: int) -> AttentionConfig:
    kv, group = min(attention.kv_heads, 2), min(attention.num_heads // attention.kv_heads, 2)

    def window(size: int) -> int:
        if size == -1 or size >= length:
            return -1 if size == -1 else LENGTH
        return min(max(2, round(size / length * LENGTH)), LENGTH - 1)

    return dataclasses.replace(
        attention,
        num_heads=kv * group,
        num_kv_heads=None if attention.num_kv_heads is None else kv,
        head_dim=_HEAD_DIM,
        window_pattern=tuple(map(window, attention.window_pattern)),
        implementation="auto",
    )


def _width(model: ModelConfig, attention: AttentionConfig) -> int:
    """Wider or narrower than all heads together, or as wide, as in the model."""
    whole, heads = model.attention.num_heads * model.head_dim, attention.num_heads * _HEAD_DIM
    return heads if whole == model.embed_dim else max(8, heads // 2) if whole > model.embed_dim else 2 * heads


def _experts(moe: MoEConfig) -> MoEConfig:
    """As few experts as divide over the same ranks, top_k in proportion to them."""
    count, shared = moe.num_experts, min(moe.num_shared_experts, 2)
    if count > 16:
        count = {8: 16, 4: 12, 2: 10, 1: 9}[math.gcd(count, 8)]
    top_k = min(moe.top_k, 4, count) if moe.top_k < moe.num_experts else count
    router = dataclasses.replace(
        moe.router,
        balance_loss_weight=_visible(moe.router.balance_loss_weight),
        z_loss_weight=_visible(moe.router.z_loss_weight),
    )
    return dataclasses.replace(
        moe,
        num_experts=count,
        top_k=top_k,
        expert_dim=12,
        num_shared_experts=shared,
        shared_expert_dim=8 if shared else 0,
        router=router,
        transport="auto",
        grouped_matmul="auto",
    )


def _visible(weight: float) -> float:
    return weight and max(weight, _LEAST_WEIGHT)
