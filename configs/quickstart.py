"""A small mixture of experts on the shipped Shakespeare, for a laptop.

Hardware: 2 CPU cores, about two minutes. Result: a held-out loss of 1.86 nats a byte, against the 3.34 of letter frequencies.

    moejax train quickstart
    moejax train quickstart --mesh.ep 4     # the same run, experts split over four devices
"""

from moejax.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    ScheduleConfig,
    TrainConfig,
)


def config() -> TrainConfig:
    return TrainConfig(
        name="quickstart",
        steps=450,
        batch_size=32,
        model=ModelConfig(
            vocab_size=320,
            embed_dim=96,
            num_layers=3,
            num_dense_layers=1,
            mlp_dim=384,
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=10_000.0, qk_norm="head"),
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                expert_dim=96,
                num_shared_experts=1,
                shared_expert_dim=96,
                router=RouterConfig(restore_scale=True, balance_loss="local", balance_loss_weight=0.01, z_loss_weight=1e-4),
            ),
            norm_placement="peri",
            z_loss_weight=1e-4,
        ),
        data=DataConfig(seq_len=64),
        optim=OptimConfig(lr=5e-3, schedule=ScheduleConfig(kind="cosine", warmup_steps=40)),
        checkpoint=CheckpointConfig(every=150),
        eval=EvalConfig(every=150, sequences=256),
        log=LogConfig(every=10),
    )
