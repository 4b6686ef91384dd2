"""FLOPs and parameters against counts done by hand, and known device names."""

import pytest

from moejax.config import AttentionConfig, ModelConfig, MoEConfig
from moejax.train.flops import count_parameters, flops_per_token, peak_flops

DENSE = ModelConfig(
    vocab_size=10,
    embed_dim=8,
    num_layers=2,
    num_dense_layers=2,
    mlp_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1),
    moe=None,
)
SPARSE = ModelConfig(
    vocab_size=10,
    embed_dim=8,
    num_layers=3,
    num_dense_layers=1,
    mlp_dim=16,
    attention=AttentionConfig(num_heads=2, qk_norm="head", window_pattern=(2,)),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=6, num_shared_experts=2, shared_expert_dim=5),
    norm_placement="peri",
    embed_norm=True,
    tie_embeddings=True,
)


def test_dense_flops_equal_a_count_by_hand():
    # w_q 8*2*4, w_k and w_v 8*1*4, w_o 2*4*8; a token of a causal sequence of 4 sees (1+2+3+4)/4 = 2.5 keys.
    attention = 2 * (6 * (64 + 32 + 32 + 64) + 12 * 2 * 4 * 2.5)
    assert flops_per_token(DENSE, 4) == {"attention": attention, "dense_mlp": 2 * 18 * 8 * 16, "head": 6 * (8 * 10 + 8)}


def test_sparse_flops_equal_a_count_by_hand():
    # Layers 0 and 2 see (1+2+3+4)/4 keys, layer 1 with a window of 2 sees (1+2+2+2)/4; QK-norm adds 2*4 parameters.
    attention = 3 * 6 * (4 * 64 + 8) + 12 * 2 * 4 * (2.5 + 1.75 + 2.5)
    assert flops_per_token(SPARSE, 4) == {
        "attention": attention,
        "dense_mlp": 18 * 8 * 16,
        "router": 2 * 6 * 8 * (4 + 2),
        "routed_experts": 2 * 18 * 8 * 6 * 2,
        "shared_experts": 2 * 18 * 8 * 5 * 2,
        "head": 6 * (8 * 10 + 8),
    }


def test_a_window_longer_than_the_sequence_is_full_attention():
    long = ModelConfig(
        vocab_size=10,
        embed_dim=8,
        num_layers=4,
        num_dense_layers=4,
        mlp_dim=16,
        moe=None,
        attention=AttentionConfig(num_heads=2, window_pattern=(99,)),
    )
    full = ModelConfig(
        vocab_size=10, embed_dim=8, num_layers=4, num_dense_layers=4, mlp_dim=16, moe=None, attention=AttentionConfig(num_heads=2)
    )
    assert flops_per_token(long, 16) == flops_per_token(full, 16)


def test_parameters_equal_a_count_by_hand():
    assert count_parameters(DENSE) == (2 * 80 + 8 + 2 * (192 + 16 + 3 * 8 * 16),) * 2
    block = 4 * 64 + 8 + 4 * 8
    total = 80 + 2 * 8 + 3 * block + 3 * 8 * 16 + 2 * (8 * (4 + 2) + 2 * 3 * 8 * 5 + 4 * 3 * 8 * 6)
    assert count_parameters(SPARSE) == (total, total - 2 * 2 * 3 * 8 * 6)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_peak_of_a_device_kind(kind, peak):
    assert peak_flops(kind) == peak
