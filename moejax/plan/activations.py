"""Memory that the training step needs beside its arguments, by arithmetic; bytes of one GPU.

Most is in use when the backward pass enters the last MoE block of a microbatch:

    gradient sums       float32, of all parameters                                    for the whole step
    gradients           compute dtype, of one block
    kept activations    of every block                                                until its backward pass
    working set         one MoE block: computed again, and backward

With pipeline stages the kept activations are those of one stage, times the passes that the table of the schedule has waiting at once.
Between stages lie inputs and their gradients (`moejax.plan.stages`).
"""

from collections.abc import Iterable

from moejax.config import TrainConfig
from moejax.plan.formula import local_parameters, rank_layers
from moejax.plan.moves import ITEM_BYTES, dispatch_buffer_bytes, portion_of, route_bytes, staging_bytes, tokens, transport_of
from moejax.plan.stages import stages_of


def temp_bytes(config: TrainConfig) -> dict[str, int]:
    """Parts of the memory at the peak. Their sum is what XLA's arena holds, but for small buffers and what packing wastes."""
    stages, kept = stages_of(config), kept_bytes(config)
    return {
        "gradient sums": sum_bytes(config),
        "gradients": gradient_bytes(config),
        "kept activations": kept if stages is None else kept * stages.kept,
        **waiting_bytes(config),
        "working set": working_bytes(config),
    }


def sum_bytes(config: TrainConfig) -> int:
    """Float32 sums of gradients; in a pipeline those of the prologue are made when no activations wait any more."""
    names = ("moe_blocks", "head", *(("embed",) if config.model.tie_embeddings else ())) if config.mesh.pp > 1 else ("",)
    return sum(4 * count for name, count, _ in local_parameters(config) if name.startswith(names))


def gradient_bytes(config: TrainConfig) -> int:
    """Gradients of one block's weights."""
    stack, layers = ("moe_blocks", rank_layers(config)) if config.model.moe is not None else ("dense_blocks", config.model.num_layers)
    return sum(count * ITEM_BYTES[dtype] // layers for name, count, dtype in local_parameters(config) if name.startswith(stack))


def kept_bytes(config: TrainConfig) -> int:
    """What all blocks keep on the device for the backward pass, of one microbatch."""
    model, named = config.model, named_bytes(config)
    names = {"none": tuple(named), "offload": ()}.get(model.recompute, ("block_in", *model.kept_residuals))
    kept = _in_all_blocks(config, names)
    if model.recompute == "none":
        # Beside the named results: hidden activations, arguments of norms, the middle of the block.
        dense, moe = _blocks_kept(config)
        norms = {"pre": 2, "post": 2, "peri": 4}[model.norm_placement]
        kept += (dense + moe) * ((norms + 1) * named["block_in"] + (model.attention.qk_norm != "none") * named["qkv"])
        chunks = 1 if model.moe is None else portion_of(config).chunks
        kept += moe * (chunks * named.get("expert_gate_up", 0) + named.get("shared_gate_up", 0)) // 2 + dense * named["mlp_gate_up"] // 2
    return kept


def offloaded_bytes(config: TrainConfig) -> int:
    """What waits in pinned host memory between a forward and a backward pass, of one GPU."""
    return _in_all_blocks(config, config.model.kept_residuals) if config.model.recompute == "offload" else 0


def _in_all_blocks(config: TrainConfig, names: Iterable[str]) -> int:
    """Bytes of the results of these names that exist at once; each is in dense blocks, in MoE blocks, or in both."""
    named = named_bytes(config)
    dense, moe = _blocks_kept(config)
    chunks = 1 if config.model.moe is None else portion_of(config).chunks
    blocks = {"mlp_gate_up": dense, "shared_gate_up": moe} | dict.fromkeys(("expert_rows", "expert_gate_up", "expert_out"), moe * chunks)
    return sum(named[name] * blocks.get(name, dense + moe) for name in set(names))


def _blocks_kept(config: TrainConfig) -> tuple[int, int]:
    """Dense and MoE blocks whose activations a rank keeps at once, of one microbatch. The prologue of a pipeline runs on its own."""
    moe = rank_layers(config) // config.mesh.virtual_stages
    return (0, moe) if config.mesh.pp > 1 else (config.model.num_dense_layers, moe)


def waiting_bytes(config: TrainConfig) -> dict[str, int]:
    """What waits between the stages of a pipeline; nothing without one."""
    stages = stages_of(config)
    return {} if stages is None else {"between stages": stages.between * named_bytes(config)["block_in"]}


def working_bytes(config: TrainConfig) -> int:
    """One MoE block on its way back: experts' rows and their gradients, routes out and in, float32 rows of tokens; of one chunk."""
    model, named = config.model, named_bytes(config)
    if model.moe is None:
        return 3 * named["mlp_gate_up"] + 8 * 4 * tokens(config) * model.embed_dim
    chunks = portion_of(config).chunks  # all are computed again before the last one's backward pass
    back = named["expert_gate_up"] * 3 // 2 + 2 * named["expert_rows"]
    again = 0
    if model.recompute != "none":
        again = named["expert_gate_up"] // 2
        again += sum(named[name] for name in ("expert_rows", "expert_gate_up") if name not in model.kept_residuals)
    return back + chunks * again + 2 * named["expert_out"] + staging_bytes(config) + 4 * 4 * tokens(config) * model.embed_dim


def named_bytes(config: TrainConfig) -> dict[str, int]:
    """Size of each named result (`moejax.config.RESIDUALS`) of one block and microbatch, those of experts of one chunk."""
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
            # Transports of tokens keep what experts return, those of rows what came back of it.
            "expert_out": rows if transport_of(config) in ("ring", "local") else route_bytes(config) // portion_of(config).chunks,
            "shared_gate_up": count * 2 * moe.num_shared_experts * moe.shared_expert_dim * item,
        }
    return named
