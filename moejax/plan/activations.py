"""Memory that the training step needs beside its arguments, by arithmetic; bytes of one GPU.

Most is in use when the backward pass enters the last MoE block of a microbatch:

    gradient sums       float32, all parameters                                       for the whole step
    gradients           compute dtype, of head and MoE blocks; one microbatch's
    kept activations    of every block                                                until its backward pass
    working set         one MoE block: computed again, and backward

When the backward pass leaves the first block, all gradients are there and no activations.

With pipeline stages the gradients are those of one stage, and the activations those of one stage, which is computed again for its backward
pass. Beside them wait inputs of stages: as many as (interleaved) 1F1B has under way on the first rank when every tick is a forward and a
backward pass, which is the warm-up of Narayanan et al. 2021 (arXiv:2104.04473) and one; and the rings of the prologue.
"""

from collections.abc import Iterable

from moejax.config import TrainConfig
from moejax.plan.formula import ITEM_BYTES, dispatch_buffer_bytes, local_parameters, rank_layers, row_bytes, tokens


def temp_bytes(config: TrainConfig) -> dict[str, int]:
    """Parts of the memory at the peak. Their sum is what XLA's arena holds, but for small buffers and what packing wastes."""
    sums = late = early = 0
    for name, count, dtype in local_parameters(config):
        sums += 4 * count
        if name.startswith(("head", "moe_blocks")):
            late += count * ITEM_BYTES[dtype] // (config.mesh.virtual_stages if name.startswith("moe_blocks") else 1)
        else:
            early += count * ITEM_BYTES[dtype]
    kept, working = kept_bytes(config), working_bytes(config)
    if kept + working < early:
        return {"gradient sums": sums, "gradients": late + early}
    return {"gradient sums": sums, "gradients": late, "kept activations": kept, "working set": working}


def kept_bytes(config: TrainConfig) -> int:
    """What all blocks keep on the device for the backward pass, of one microbatch, and what waits between pipeline stages."""
    model, named = config.model, named_bytes(config)
    names = {"none": tuple(named), "offload": ()}.get(model.recompute, ("block_in", *model.kept_residuals))
    kept = _in_all_blocks(config, names) + waiting_inputs(config) * named["block_in"]
    if model.recompute == "none":
        # Beside the named results: hidden activations, arguments of norms, the middle of the block.
        dense, moe = _blocks_kept(config)
        norms = {"pre": 2, "post": 2, "peri": 4}[model.norm_placement]
        kept += (dense + moe) * ((norms + 1) * named["block_in"] + (model.attention.qk_norm != "none") * named["qkv"])
        kept += moe * (named.get("expert_gate_up", 0) + named.get("shared_gate_up", 0)) // 2 + dense * named["mlp_gate_up"] // 2
    return kept


def offloaded_bytes(config: TrainConfig) -> int:
    """What waits in pinned host memory between a forward and a backward pass, of one GPU."""
    return _in_all_blocks(config, config.model.kept_residuals) if config.model.recompute == "offload" else 0


def _in_all_blocks(config: TrainConfig, names: Iterable[str]) -> int:
    """Bytes of the results of these names that exist at once; each is in dense blocks, in MoE blocks, or in both."""
    named = named_bytes(config)
    dense, moe = _blocks_kept(config)
    blocks = {"mlp_gate_up": dense, "expert_rows": moe, "expert_gate_up": moe, "expert_out": moe, "shared_gate_up": moe}
    return sum(named[name] * blocks.get(name, dense + moe) for name in set(names))


def _blocks_kept(config: TrainConfig) -> tuple[int, int]:
    """Dense and MoE blocks whose activations a rank keeps at once, of one microbatch. The prologue of a pipeline runs on its own."""
    moe = rank_layers(config) // config.mesh.virtual_stages
    return (0, moe) if config.mesh.pp > 1 else (config.model.num_dense_layers, moe)


def waiting_inputs(config: TrainConfig) -> int:
    """Inputs and gradients of stages that a pipeline rank holds at once: under way, arriving, in the rings, a slot of each for waste."""
    pp, virtual, microbatches = config.mesh.pp, config.mesh.virtual_stages, config.microbatches
    if pp == 1:
        return 0
    under_way = min(2 * (pp - 1) + (virtual - 1) * pp + 1, virtual * microbatches)
    if config.mesh.schedule_name == "gpipe":
        under_way = microbatches
    return under_way + 1 + 2 * 2 + 2 + 2 * -(-microbatches // pp)


def working_bytes(config: TrainConfig) -> int:
    """One MoE block on its way back: experts' rows and their gradients, routes out and in, float32 rows of tokens."""
    model, named = config.model, named_bytes(config)
    if model.moe is None:
        return 3 * named["mlp_gate_up"] + 8 * 4 * tokens(config) * model.embed_dim
    back = named["expert_gate_up"] * 3 // 2 + 2 * named["expert_rows"]
    again = 0
    if model.recompute != "none":
        again = named["expert_gate_up"] // 2
        again += sum(named[name] for name in ("expert_rows", "expert_gate_up") if name not in model.kept_residuals)
    return back + again + 2 * named["expert_out"] + 4 * 4 * tokens(config) * model.embed_dim


def named_bytes(config: TrainConfig) -> dict[str, int]:
    """Size of each named result (`moejax.config.RESIDUALS`) of one block and microbatch."""
    model, item, count = config.model, ITEM_BYTES[config.model.dtype], tokens(config)
    heads, kv_heads = model.attention.num_heads * model.head_dim, model.attention.kv_heads * model.head_dim
    tables = config.data.documents if model.dtype == "bfloat16" and model.attention.implementation != "xla" else 1
    named = {
        "block_in": count * model.embed_dim * item,
        "qkv": count * (heads + 2 * kv_heads) * item,
        "attention": count * heads * item + 4 * count * model.attention.num_heads * tables,  # cuDNN's logsumexp has a row for each document
        "mlp_gate_up": count * 2 * model.mlp_dim * item,
    }
    if (moe := model.moe) is not None:
        rows = dispatch_buffer_bytes(config)
        named |= {
            "expert_rows": rows,
            "expert_gate_up": rows // model.embed_dim * 2 * moe.expert_dim,
            "expert_out": row_bytes(config),
            "shared_gate_up": count * 2 * moe.num_shared_experts * moe.shared_expert_dim * item,
        }
    return named
