"""Olmo-core 3's eight-layer benchmark at 64 experts: 24.31B parameters, 3.17B active, EP8 on one node.

Source: the tech report on Olmo-core 3's mixtures of experts, by its example script src/examples/olmo_ddp/moe_8l_ddp.py.
Hardware: 8 B300 (1 node of 8).

    moejax plan eight_layers --gpu b300
    moejax train eight_layers
    moejax train eight_layers --model.moe.num-experts 128            # the family: 8, 32, 48, 64 or 128 experts, 4.58B to 46.86B
    moejax train eight_layers --mesh.dp 8 --mesh.ep 1 --microbatches 64      # experts not split; with 32 it does not fit a B300
    moejax train eight_layers --mesh.weights fsdp                    # the baseline that gathers weights

    experts       8        32       48       64       128            active parameters: 3.17B in all of them
    parameters    4.58B    13.04B   18.67B   24.31B   46.86B

Routing is random, as in the script: a system reference, not a model to judge. 100 steps are the script's, which saves nothing; here the
last step is saved. Its other switches: uniform routing (--model.moe.router.assignment uniform) and recompute (--model.recompute block).
"""

from moejax.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
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
        name="eight_layers",
        steps=100,
        batch_size=512,  # 4Mi tokens
        microbatches=32,  # of 2 sequences on each GPU
        seed=2026,
        model=ModelConfig(
            vocab_size=100_352,
            embed_dim=4096,
            num_layers=8,
            num_dense_layers=1,
            mlp_dim=20_480,  # as wide as a token's routed and shared experts together
            attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm="head"),
            moe=MoEConfig(
                num_experts=64,
                top_k=4,
                expert_dim=4096,
                num_shared_experts=1,
                shared_expert_dim=4096,
                router=RouterConfig(
                    assignment="random", restore_scale=True, balance_loss="local", balance_loss_weight=0.015, z_loss_weight=1e-4
                ),
                capacity_factor=1.25,
            ),
            norm_placement="post",
            embed_scale=4096**0.5,
            embed_norm=True,
            init_std=0.01,
            z_loss_weight=1e-4,
            dtype="bfloat16",
        ),
        mesh=MeshConfig(dp=1, ep=8),
        data=DataConfig(source="synthetic", seq_len=8192),
        optim=OptimConfig(
            lr=3e-4,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            no_decay=("embed.w_embed",),
            max_grad_norm=1.0,
            skip_sigma=12.0,
            schedule=ScheduleConfig(kind="cosine", warmup_steps=10, final_fraction=0.1),
        ),
        checkpoint=CheckpointConfig(every=100),
        eval=EvalConfig(every=None),
        log=LogConfig(every=5),
    )
