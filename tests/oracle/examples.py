"""Small configs, parameters and batches for the tests that compare with the oracle."""

import dataclasses

import numpy as np

from moejax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, MoEConfig, OptimConfig, RouterConfig, TrainConfig

VOCAB = 40


def model_config(*, router: dict | None = None, moe: dict | None = None, attention: dict | None = None, **model) -> ModelConfig:
    """Two layers of width 16, 8 experts, top-2; keyword arguments replace fields."""
    experts = None
    if model.get("num_dense_layers", 0) < model.get("num_layers", 2):
        experts = MoEConfig(**({"num_experts": 8, "top_k": 2, "expert_dim": 12} | (moe or {})), router=RouterConfig(**(router or {})))
    heads = AttentionConfig(**({"num_heads": 2, "num_kv_heads": 1, "rope_theta": 100.0} | (attention or {})))
    return ModelConfig(**({"vocab_size": VOCAB, "embed_dim": 16, "num_layers": 2, "loss_chunk": 16} | model), attention=heads, moe=experts)


def train_config(
    model: ModelConfig, *, dp=1, ep=1, microbatches=1, batch_size=16, seq_len=5, optim: dict | None = None, name="test", **other
) -> TrainConfig:
    """A run of that model; the data settings are never opened."""
    return TrainConfig(
        name=name,
        steps=10,
        batch_size=batch_size,
        microbatches=microbatches,
        model=model,
        mesh=MeshConfig(dp=dp, ep=ep),
        data=DataConfig(source="files", paths=("none.npy",), seq_len=seq_len),
        optim=OptimConfig(**(optim or {})),
        **other,
    )


def on_mesh(config: TrainConfig, dp: int, ep: int, microbatches: int | None = None) -> TrainConfig:
    """The same run on another mesh."""
    return dataclasses.replace(config, mesh=MeshConfig(dp=dp, ep=ep), microbatches=microbatches or config.microbatches)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Dotted name -> shape of every parameter."""
    d, h, n, k = config.embed_dim, config.head_dim, config.attention.num_heads, config.attention.kv_heads
    block = {"attention.w_q": (d, n, h), "attention.w_k": (d, k, h), "attention.w_v": (d, k, h), "attention.w_o": (n, h, d)}
    if config.attention.qk_norm != "none":
        whole = config.attention.qk_norm == "width"
        block |= {"attention.q_norm.scale": (n * h if whole else h,), "attention.k_norm.scale": (k * h if whole else h,)}
    for branch in ("attention", "ffn"):
        block |= {f"{branch}_norm_in.scale": (d,)} if config.norm_placement in ("pre", "peri") else {}
        block |= {f"{branch}_norm_out.scale": (d,)} if config.norm_placement in ("post", "peri") else {}
    shapes = {"embed.w_embed": (config.vocab_size, d), "head.norm.scale": (d,)}
    shapes |= {} if config.tie_embeddings else {"head.w_head": (d, config.vocab_size)}
    shapes |= {"embed.norm.scale": (d,)} if config.embed_norm else {}
    dense = block | {"mlp.w_in": (d, 2, config.mlp_dim), "mlp.w_out": (config.mlp_dim, d)}
    if config.num_dense_layers:
        shapes |= {f"dense_blocks.{name}": (config.num_dense_layers, *shape) for name, shape in dense.items()}
    if (moe := config.moe) is not None:
        e, f, s, g = moe.num_experts, moe.expert_dim, moe.num_shared_experts, moe.shared_expert_dim
        sparse = block | {"moe.router.w_router": (d, e), "moe.experts.w_in": (e, d, 2, f), "moe.experts.w_out": (e, f, d)}
        sparse |= {"moe.shared.w_in": (s, d, 2, g), "moe.shared.w_out": (s, g, d)} if s else {}
        sparse |= {"moe.shared.w_router": (d, s)} if s > 1 else {}
        shapes |= {f"moe_blocks.{name}": (config.num_moe_layers, *shape) for name, shape in sparse.items()}
    return shapes


def parameters(config: ModelConfig, seed: int = 0) -> dict:
    """Nested dict of random float32 parameters of a size at which every part matters; norm scales lie around 1."""
    rng = np.random.default_rng(seed)
    tree: dict = {}
    for name, shape in parameter_shapes(config).items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        spread = {"scale": 0.2, "w_embed": 1.0, "w_router": 0.5}.get(last, 0.3)
        place[last] = (rng.normal(size=shape) * spread + (last == "scale")).astype(np.float32)
    return tree


def batch(batch_size=16, seq_len=5, seed=0, *, documents=False, padding=False) -> dict[str, np.ndarray]:
    """Random tokens with their next-token labels; optionally two documents a row, and padding at the end of some rows."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCAB, (batch_size, seq_len + 1))
    segment_ids = np.ones((batch_size, seq_len), int)
    positions = np.tile(np.arange(seq_len), (batch_size, 1))
    for row in range(batch_size if documents else 0):
        cut = int(rng.integers(1, seq_len))
        segment_ids[row, cut:] = 2
        positions[row, cut:] -= cut
    for row in range(0, batch_size if padding else 0, 2):
        segment_ids[row, seq_len - 1 - int(rng.integers(0, seq_len - 1)) :] = 0
    following = np.concatenate([segment_ids[:, 1:], segment_ids[:, -1:]], axis=1)
    labels = np.where((following == segment_ids) & (segment_ids != 0), text[:, 1:], -1)
    arrays = {"tokens": text[:, :-1], "labels": labels, "segment_ids": segment_ids, "positions": positions}
    return {name: np.ascontiguousarray(value, dtype=np.int32) for name, value in arrays.items()}
