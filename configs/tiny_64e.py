"""Tiny-64E of Olmo-core 3: 12.91B parameters, 1.59B active, experts not split (EP1).

Source: the tech report on Olmo-core 3's mixtures of experts, by its example script src/examples/olmo_ddp/OLMoE3-dev-t001-random.py.
Hardware: 16 B300 (2 nodes of 8).

    moejax plan tiny_64e --gpu b300
    moejax train tiny_64e
    moejax train tiny_64e --model.moe.router.assignment learned                           # t001: routing is learned
    moejax train tiny_64e --model.moe.router.assignment learned --mesh.dp 2 --mesh.ep 8   # t002: experts split over 8 GPUs too

One rank that holds all experts drops nothing, so the capacity acts under EP8 alone. Routing is random, as in the run whose
throughput is published: a system reference, not a model to judge. The learning rate is the script's 1.8e-4 for 8Mi tokens a step.
The script warms up over 30B tokens and ends at 200B without a decay; the decay over the last tenth is Olmo-core's default for this
schedule. Its filter of repeated n-grams has no counterpart here.
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
        name="tiny_64e",
        steps=23_842,  # 200B tokens, as in the script
        batch_size=1024,  # 8Mi tokens
        microbatches=8,  # of 8 sequences on each GPU
        seed=2026,
        model=ModelConfig(
            vocab_size=100_352,
            embed_dim=2048,
            num_layers=16,
            num_dense_layers=1,
            mlp_dim=10_240,  # as wide as a token's routed and shared experts together
            attention=AttentionConfig(num_heads=16, num_kv_heads=4, head_dim=128, qk_norm="head"),
            moe=MoEConfig(
                num_experts=64,
                top_k=4,
                expert_dim=2048,
                num_shared_experts=1,
                shared_expert_dim=2048,
                router=RouterConfig(
                    assignment="random", restore_scale=True, balance_loss="local", balance_loss_weight=0.01, z_loss_weight=2e-4
                ),
                capacity_factor=1.1875,
            ),
            norm_placement="peri",
            embed_scale=2048**0.5,
            embed_norm=True,
            init_std=0.01,
            z_loss_weight=1e-4,
            dtype="bfloat16",
        ),
        mesh=MeshConfig(dp=16, ep=1),
        data=DataConfig(source="synthetic", seq_len=8192),
        optim=OptimConfig(
            lr=1.8e-4,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            skip_sigma=12.0,
            schedule=ScheduleConfig(kind="wsd", warmup_steps=3576, decay_steps=2384, final_fraction=0.0),  # 30B tokens of warm-up
        ),
        checkpoint=CheckpointConfig(every=2000),
        eval=EvalConfig(every=None),
    )
