"""Ultra-256E of Olmo-core 3: 2.380T parameters, 58.41B active, EP32 across nodes in 8 pipeline stages, MXFP8.

Source: the tech report on Olmo-core 3's mixtures of experts, by its example script src/examples/olmo_ddp/OLMoE3-dev-u002.py.
Hardware: 512 B300 (64 nodes of 8).

    moejax plan ultra_256e --gpu b300

Routing is random, as in the run whose throughput is published: a system reference, not a model to judge. The learning rate is the
script's 1.2e-4 for 8Mi tokens a step, times 8^0.53. The script warms up over 30B tokens and ends at 200B without a decay; the decay
over the last tenth is Olmo-core's default for this schedule. Its filter of repeated n-grams has no counterpart here, and its stages
begin every 4 blocks, the last one a block smaller. There (DeepEP v2) rows come back in bfloat16.
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
        name="ultra_256e",
        steps=2980,  # 200B tokens, as in the script
        batch_size=8192,  # 64Mi tokens
        microbatches=64,  # of 2 sequences on each GPU
        seed=2026,
        model=ModelConfig(
            vocab_size=100_352,
            embed_dim=6144,
            num_layers=63,
            num_dense_layers=2,
            mlp_dim=40_960,  # as wide as a token's routed and shared experts together
            attention=AttentionConfig(num_heads=64, num_kv_heads=32, head_dim=128, qk_norm="head"),
            moe=MoEConfig(
                num_experts=256,
                top_k=4,
                expert_dim=8192,
                num_shared_experts=1,
                shared_expert_dim=8192,
                router=RouterConfig(
                    assignment="random", restore_scale=True, balance_loss="local", balance_loss_weight=0.005, z_loss_weight=2e-4
                ),
                capacity_factor=1.1875,
            ),
            norm_placement="peri",
            embed_scale=6144**0.5,
            embed_norm=True,
            init_std=0.01,
            z_loss_weight=1e-4,
            dtype="bfloat16",
            precision="mxfp8",
            recompute="block",
        ),
        mesh=MeshConfig(pp=8, virtual_stages=2, dp=2, ep=32),
        data=DataConfig(source="synthetic", seq_len=8192),
        optim=OptimConfig(
            lr=1.2e-4 * 8**0.53,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            skip_sigma=12.0,
            schedule=ScheduleConfig(kind="wsd", warmup_steps=447, decay_steps=298, final_fraction=0.0),  # 30B tokens of warm-up
        ),
        checkpoint=CheckpointConfig(every=2000),
        eval=EvalConfig(every=None),
    )
