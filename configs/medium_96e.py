"""Medium-96E of Olmo-core 3: 103.75B parameters, 7.38B active, EP8 in 2 pipeline stages.

Source: the tech report on Olmo-core 3's mixtures of experts, by its example script src/examples/olmo_ddp/OLMoE3-dev-m001.py.
Hardware: 128 B300 (16 nodes of 8).

    moejax plan medium_96e --gpu b300
    moejax train medium_96e

Routing is random, as in the run whose throughput is published: a system reference, not a model to judge. The learning rate is the
script's 1.8e-4 for 8Mi tokens a step, times 3^0.53. The script warms up over 30B tokens and ends at 200B without a decay; the decay
over the last tenth is Olmo-core's default for this schedule. Its filter of repeated n-grams has no counterpart here, and its stages
begin every 10 blocks, the last one a block smaller.
"""

from moejax.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    ScheduleConfig,
    TrainConfig,
)


def config() -> TrainConfig:
    return TrainConfig(
        name="medium_96e",
        steps=7947,  # 200B tokens, as in the script
        batch_size=3072,  # 24Mi tokens
        microbatches=24,  # of 2 sequences on each GPU
        seed=2026,
        model=ModelConfig(
            vocab_size=100_352,
            embed_dim=3072,
            num_layers=39,
            num_dense_layers=2,
            mlp_dim=15_360,  # as wide as a token's routed and shared experts together
            attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm="head"),
            moe=MoEConfig(
                num_experts=96,
                top_k=4,
                expert_dim=3072,
                num_shared_experts=1,
                shared_expert_dim=3072,
                router=RouterConfig(
                    assignment="random", restore_scale=True, balance_loss="local", balance_loss_weight=0.005, z_loss_weight=2e-4
                ),
                capacity_factor=1.1875,
            ),
            norm_placement="peri",
            embed_scale=3072**0.5,
            embed_norm=True,
            init_std=0.01,
            z_loss_weight=1e-4,
            dtype="bfloat16",
        ),
        mesh=MeshConfig(pp=2, virtual_stages=2, dp=8, ep=8),
        data=DataConfig(source="synthetic", seq_len=8192),
        optim=OptimConfig(
            lr=1.8e-4 * 3**0.53,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            skip_sigma=12.0,
            schedule=ScheduleConfig(kind="wsd", warmup_steps=1192, decay_steps=794, final_fraction=0.0),  # 30B tokens of warm-up
        ),
        checkpoint=CheckpointConfig(every=2000),
        eval=EvalConfig(every=None),
    )
