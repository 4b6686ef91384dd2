"""Parameters and training FLOPs of a model, counted from its config; peak rates of known GPUs.

The count is Olmo-core's: forward and backward of every product, embeddings excluded, recompute and padding never counted.
"""

import re

from moejax.config import ModelConfig

# Dense bf16 tensor-core rate in FLOP/s. NVIDIA data sheets give twice that where they assume 2:4 sparsity (H100, H200,
# HGX B200 and B300, GB200 and GB300 NVL72, A100). A kind matches if it has every word; the first match counts.
_PEAKS = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("GH200", 989.5e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device by JAX's device_kind, None where it is not known (CPUs, other GPUs)."""
    words = set(re.split(r"[\s_-]+", device_kind.lower()))
    return next((peak for kind, peak in _PEAKS if set(kind.lower().split()) <= words), None)


def flops_per_token(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Training FLOPs of one token by part of the model; their sum is what model FLOP/s and MFU use.

    Attention counts the keys that a causal or sliding window shows a token on average, as if a sequence were one document.
    """
    dim, counts = model.embed_dim, _counts(model)
    result = {"attention": 6.0 * counts["attention"] * model.num_layers}
    result["attention"] += sum(
        12.0 * model.attention.num_heads * model.head_dim * _visible_keys(seq_len, model.window(layer)) for layer in range(model.num_layers)
    )
    if model.num_dense_layers:
        result["dense_mlp"] = 6.0 * counts["dense_mlp"] * model.num_dense_layers
    if model.moe is not None:
        result["router"] = 6.0 * counts["router"] * model.num_moe_layers
        result["routed_experts"] = 6.0 * counts["routed_expert"] * model.moe.top_k * model.num_moe_layers
        result["shared_experts"] = 6.0 * counts["shared_experts"] * model.num_moe_layers
    result["head"] = 6.0 * (dim * model.vocab_size + dim)
    return result


def count_parameters(model: ModelConfig) -> tuple[int, int]:
    """All parameters, and those that one token uses (top_k of the routed experts; everything else, embeddings too)."""
    dim, counts = model.embed_dim, _counts(model)
    norms = dim * (4 if model.norm_placement == "peri" else 2)
    total = dim * model.vocab_size * (1 if model.tie_embeddings else 2) + dim * (2 if model.embed_norm else 1)
    total += model.num_layers * (counts["attention"] + norms) + model.num_dense_layers * counts["dense_mlp"]
    if model.moe is None:
        return total, total
    total += model.num_moe_layers * (counts["router"] + counts["shared_experts"] + model.moe.num_experts * counts["routed_expert"])
    idle = model.num_moe_layers * (model.moe.num_experts - model.moe.top_k) * counts["routed_expert"]
    return total, total - idle


def _counts(model: ModelConfig) -> dict[str, int]:
    """Parameters of the parts of one layer."""
    dim, heads, kv_heads, width = model.embed_dim, model.attention.num_heads, model.attention.kv_heads, model.head_dim
    qk_norm = {"none": 0, "head": 2 * width, "width": (heads + kv_heads) * width}[model.attention.qk_norm]
    counts = {"attention": 2 * dim * width * (heads + kv_heads) + qk_norm, "dense_mlp": 3 * dim * model.mlp_dim}
    if model.moe is not None:
        shared = model.moe.num_shared_experts
        counts["router"] = dim * model.moe.num_experts + (dim * shared if shared > 1 else 0)
        counts["routed_expert"] = 3 * dim * model.moe.expert_dim
        counts["shared_experts"] = 3 * dim * model.moe.shared_expert_dim * shared
    return counts


def _visible_keys(seq_len: int, window: int) -> float:
    """Keys that a token attends to, averaged over the positions of a sequence."""
    window = seq_len if window == -1 else min(window, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
