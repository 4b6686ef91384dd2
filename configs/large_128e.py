"""Large-128E of Olmo-core 3: 295.99B parameters, 15.14B active, EP8 in 4 pipeline stages.

Source: the tech report on Olmo-core 3's mixtures of experts, by its example script src/examples/olmo_ddp/OLMoE3-dev-l001.py.
Hardware: 512 B300 (64 nodes of 8).

    moejax plan large_128e --gpu b300
    moejax train large_128e
    moejax plan large_128e --gpu b300 --mesh.pp 8 --mesh.dp 8 --batch-size 3072 --microbatches 48

The last command is the published alternate: 8 stages and 24Mi tokens a step, learning rate 1.2e-4 times 3^0.53. Routing is
random, as in the run whose throughput is published: a system reference, not a model to judge. The learning rate is the script's
1.2e-4 for 8Mi tokens a step, times 4^0.53. The script warms up over 30B tokens and ends at 200B without a decay; the decay over the
last tenth is Olmo-core's default for this schedule. Its filter of repeated n-grams has no counterpart here, and its stages begin
every 6 blocks, the last one a block smaller.
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
        name="large_128e",
        steps=5960,  # 200B tokens, as in the script
        batch_size=4096,  # 32Mi tokens
        microbatches=32,  # of 1 sequence on each GPU
        seed=2026,
        model=ModelConfig(
            vocab_size=100_352,
            embed_dim=4096,
            num_layers=47,
            num_dense_layers=2,
            mlp_dim=20_480,  # as wide as a token's routed and shared experts together
            attention=AttentionConfig(num_heads=40, num_kv_heads=10, head_dim=128, qk_norm="head"),
            moe=MoEConfig(
                num_experts=128,
                top_k=4,
                expert_dim=4096,
                num_shared_experts=1,
                shared_expert_dim=4096,
                router=RouterConfig(
                    assignment="random", restore_scale=True, balance_loss="local", balance_loss_weight=0.005, z_loss_weight=2e-4
                ),
                capacity_factor=1.1875,
            ),
            norm_placement="peri",
            embed_scale=4096**0.5,
            embed_norm=True,
            init_std=0.01,
            z_loss_weight=1e-4,
            dtype="bfloat16",
        ),
        mesh=MeshConfig(pp=4, virtual_stages=2, dp=16, ep=8),
        data=DataConfig(source="synthetic", seq_len=8192),
        optim=OptimConfig(
            lr=1.2e-4 * 4**0.53,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            skip_sigma=12.0,
            schedule=ScheduleConfig(kind="wsd", warmup_steps=894, decay_steps=596, final_fraction=0.0),  # 30B tokens of warm-up
        ),
        checkpoint=CheckpointConfig(every=2000),
        eval=EvalConfig(every=None),
    )
