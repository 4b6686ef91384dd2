"""The dense counterpart of quickstart: the same parameters used per token, none of them routed.

Train it beside quickstart to see what experts add. mlp_dim is the average of what a quickstart token meets: 384 in its
dense block, 2 routed + 1 shared experts of width 96 in the two others.

Hardware: 2 CPU cores, about as long as quickstart.

    moejax train shakespeare_dense
    moejax train shakespeare_dense --mesh.dp 4
"""

from moejax.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)


def config() -> TrainConfig:
    return TrainConfig(
        name="shakespeare_dense",
        steps=450,
        batch_size=32,
        model=ModelConfig(
            vocab_size=320,
            embed_dim=96,
            num_layers=3,
            num_dense_layers=3,
            mlp_dim=320,
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=10_000.0, qk_norm="head"),
            moe=None,
            norm_placement="peri",
            z_loss_weight=1e-4,
        ),
        data=DataConfig(seq_len=64),
        optim=OptimConfig(lr=5e-3, schedule=ScheduleConfig(kind="cosine", warmup_steps=40)),
        checkpoint=CheckpointConfig(every=150),
        eval=EvalConfig(every=150, sequences=256),
        log=LogConfig(every=10),
    )
