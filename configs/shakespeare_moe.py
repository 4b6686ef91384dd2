"""A larger mixture of experts on the shipped Shakespeare: 16 experts, balanced by router biases instead of a loss.

Source: sigmoid gating and bias updates as in auxiliary-loss-free balancing (Wang et al. 2024, arXiv:2408.15664).
Hardware: 2 CPU cores (eight times the arithmetic of quickstart) or any GPU.

    moejax train shakespeare_moe
    moejax train shakespeare_moe --mesh.dp 2 --mesh.ep 4
    moejax train shakespeare_moe --model.dtype bfloat16 --model.moe.capacity-factor 1.25     # on GPUs
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
        name="shakespeare_moe",
        steps=1000,
        batch_size=16,
        model=ModelConfig(
            vocab_size=320,
            embed_dim=192,
            num_layers=6,
            num_dense_layers=1,
            mlp_dim=576,
            attention=AttentionConfig(num_heads=6, num_kv_heads=3, rope_theta=10_000.0, qk_norm="head", window_pattern=(128, -1)),
            moe=MoEConfig(
                num_experts=16,
                top_k=4,
                expert_dim=96,
                num_shared_experts=1,
                shared_expert_dim=192,
                router=RouterConfig(
                    gating="sigmoid",
                    bias_update_rate=1e-3,
                    balance_loss="instance",
                    balance_loss_weight=1e-3,
                    z_loss_weight=1e-4,
                ),
            ),
            norm_placement="peri",
            z_loss_weight=1e-4,
        ),
        data=DataConfig(seq_len=256),
        optim=OptimConfig(lr=2e-3, schedule=ScheduleConfig(kind="wsd", warmup_steps=100, decay_steps=200)),
        checkpoint=CheckpointConfig(every=250),
        eval=EvalConfig(every=250, sequences=128),
        log=LogConfig(every=10),
    )
