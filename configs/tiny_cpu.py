"""The smallest mixture of experts that uses every part, for tests and for checking that numbers do not change.

Hardware: any CPU, seconds. Result: none worth having; a change that must not alter numerics shows the same ten losses.

    moejax train tiny_cpu
    moejax train tiny_cpu --mesh.dp 2 --mesh.ep 4     # eight fake devices, the same first losses
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
        name="tiny_cpu",
        steps=10,
        batch_size=8,
        model=ModelConfig(
            vocab_size=320,
            embed_dim=32,
            num_layers=3,
            num_dense_layers=1,
            mlp_dim=64,
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=10_000.0, qk_norm="head", window_pattern=(16, -1)),
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                expert_dim=32,
                num_shared_experts=1,
                shared_expert_dim=32,
                router=RouterConfig(restore_scale=True, balance_loss="instance", z_loss_weight=1e-4),
            ),
            z_loss_weight=1e-4,
            loss_chunk=128,
        ),
        data=DataConfig(seq_len=32, document_mask=True),
        optim=OptimConfig(lr=3e-3, schedule=ScheduleConfig(kind="constant", warmup_steps=2)),
        checkpoint=CheckpointConfig(every=5),
        eval=EvalConfig(every=5, sequences=16),
        log=LogConfig(every=1),
    )
