"""Every validation rule of the configs is broken once, and its whole message is compared."""

import ast
import traceback
from pathlib import Path
from typing import Any

import pytest

import moejax.config.model
import moejax.config.train
from moejax.config import AttentionConfig, ModelConfig, MoEConfig, TrainConfig
from moejax.errors import ConfigError
from tests.config.change import change

FILES = [moejax.config.model.__file__, moejax.config.train.__file__]


def base() -> TrainConfig:
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=32, num_shared_experts=1, shared_expert_dim=32)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2)
    model = ModelConfig(vocab_size=320, embed_dim=32, num_layers=3, num_dense_layers=1, mlp_dim=64, attention=attention, moe=moe)
    return TrainConfig(name="base", steps=100, batch_size=8, model=model)


def below(name: str, value: float, minimum: int) -> tuple[dict[str, Any], str]:
    return {name: value}, f"{name}={value} is below {minimum}; give a number >= {minimum}"


def negative(name: str, rule: str) -> tuple[dict[str, Any], str]:
    return {name: -1.0}, f"{name}=-1.0 {rule}"


def misspelled(name: str, value: str, allowed: str, nearest: str) -> tuple[dict[str, Any], str]:
    return {name: value}, f"{name}={value} is not one of {allowed}; did you mean {nearest}?"


ATTENTION = [
    below("model.attention.num_heads", 0, 1),
    below("model.attention.num_kv_heads", 0, 1),
    (
        {"model.attention.num_kv_heads": 3},
        "model.attention.num_kv_heads=3 does not divide model.attention.num_heads=4; "
        "choose a divisor of 4 or change model.attention.num_heads",
    ),
    ({"model.attention.head_dim": 7}, "model.attention.head_dim=7 is not an even number >= 2; rotary embedding turns pairs"),
    negative("model.attention.rope_theta", "is not positive; the usual base is 10000 or 500000"),
    ({"model.attention.window_pattern": ()}, "model.attention.window_pattern=() is empty; use -1 for full attention"),
    (
        {"model.attention.window_pattern": (8, 0)},
        "model.attention.window_pattern=(8, 0) holds 0; a window is >= 1 tokens, or -1 for full attention",
    ),
]

EXPERTS = [
    negative(
        "model.moe.router.normalize", "is not in [1, 16], where a p-norm and its gradient stay finite; 1.0 is usual, None switches it off"
    ),
    negative("model.moe.router.z_loss_weight", "is negative; a penalty weight is >= 0"),
    negative("model.moe.router.bias_update_rate", "is not positive; use None to switch the bias off"),
    (
        {"model.moe.router.assignment": "random", "model.moe.router.gating": "topk_softmax"},
        "model.moe.router.assignment=random replaces scores, and model.moe.router.gating=topk_softmax has none before the choice; "
        "use gating=softmax or sigmoid",
    ),
    (
        {"model.moe.router.assignment": "uniform", "model.moe.router.bias_update_rate": 0.001},
        "model.moe.router.bias_update_rate=0.001 steers learned routing, but model.moe.router.assignment=uniform ignores it; "
        "set one of them back",
    ),
    below("model.moe.num_experts", 0, 1),
    below("model.moe.top_k", 0, 1),
    ({"model.moe.top_k": 12}, "model.moe.top_k=12 exceeds model.moe.num_experts=8; lower top_k or add experts"),
    below("model.moe.expert_dim", 0, 1),
    below("model.moe.num_shared_experts", -1, 0),
    (
        {"model.moe.shared_expert_dim": 0},
        "model.moe.num_shared_experts=1 and model.moe.shared_expert_dim=0 do not agree; set both above 0, or both to 0",
    ),
    negative("model.moe.capacity_factor", "is not positive; 1.25 is usual, None never drops"),
]

MODEL = [
    below("model.vocab_size", 0, 1),
    below("model.num_dense_layers", -1, 0),
    ({"model.num_dense_layers": 4}, "model.num_dense_layers=4 exceeds model.num_layers=3; lower it or add layers"),
    ({"model.mlp_dim": 0}, "model.num_dense_layers=1 and model.mlp_dim=0 do not agree; set both above 0, or both to 0"),
    (
        {"model.num_dense_layers": 3},
        "model.num_layers=3 with model.num_dense_layers=3 leaves 0 MoE blocks, but model.moe is set; "
        "set model.moe=None or use fewer dense layers",
    ),
    (
        {"model.embed_dim": 30},
        "model.attention.num_heads=4 does not divide model.embed_dim=30; choose a divisor of 30 or change model.embed_dim",
    ),
    (
        {"model.embed_dim": 12},
        "model.embed_dim / model.attention.num_heads = 3 is odd; rotary embedding turns pairs, so give an even model.attention.head_dim",
    ),
    negative("model.norm_eps", "is not positive; 1e-6 is usual"),
    negative("model.init_std", "is not positive; 0.02 is usual"),
    negative("model.z_loss_weight", "is negative; a penalty weight is >= 0"),
]

DATA = [
    below("data.seq_len", 0, 1),
    below("data.max_documents", 0, 1),
    ({"data.source": "files"}, "data.source=files with data.paths=(); give paths exactly when source is files"),
    ({"data.eval_fraction": 1.0}, "data.eval_fraction=1.0 is not in [0, 1); 0.05 is usual"),
    (
        {"data.eos_id": 0},
        "data.eos_id=0 is for token files, but data.source=shakespeare knows its own; leave data.eos_id out",
    ),
    (
        {"data.source": "files", "data.paths": ("a.npy",), "data.document_mask": True},
        "data.document_mask=True needs to know where documents end; set data.eos_id",
    ),
    (
        {"model.vocab_size": 256},
        "model.vocab_size=256 is below 258, what the byte tokenizer needs (256 bytes, end of document, padding); use 258 or more",
    ),
    (
        {"data.eval_fraction": 0.0},
        "eval.every=500 has no text to evaluate on with data.eval_fraction=0; hold out a share such as 0.05, or set eval.every=None",
    ),
]

OPTIM = [
    below("optim.schedule.warmup_steps", -1, 0),
    below("optim.schedule.decay_steps", -1, 0),
    (
        {"optim.schedule.kind": "wsd"},
        "optim.schedule.kind=wsd with optim.schedule.decay_steps=0; wsd needs decay_steps > 0, the others 0",
    ),
    ({"optim.schedule.final_fraction": 2.0}, "optim.schedule.final_fraction=2.0 is not in [0, 1]; 0.1 is usual"),
    (
        {"optim.schedule.warmup_steps": 101},
        "optim.schedule.warmup_steps=101 + optim.schedule.decay_steps=0 exceed steps=100; train longer or shorten them",
    ),
    negative("optim.lr", "is not positive; 1e-3 to 1e-4 is usual"),
    ({"optim.b2": 1.0}, "optim.b2=1.0 is not in [0, 1); 0.9 and 0.95 are usual"),
    negative("optim.eps", "is not positive; 1e-8 is usual"),
    negative("optim.expert_weight_decay", "is negative; give a number >= 0"),
    negative("optim.max_grad_norm", "is not positive; use None for no clipping"),
    negative("optim.skip_sigma", "is not positive; use None to switch it off"),
    below("optim.skip_window", 3, 4),
]

RUN = [
    below("mesh.pp", 0, 1),
    below("mesh.virtual_stages", 0, 1),
    ({"mesh.virtual_stages": 2}, "mesh.virtual_stages=2 splits pipeline ranks, but mesh.pp=1; set mesh.virtual_stages=1"),
    ({"mesh.schedule": "gpipe"}, "mesh.schedule=gpipe orders the passes of a pipeline, but mesh.pp=1; set mesh.schedule=auto"),
    (
        {"mesh.pp": 2, "mesh.virtual_stages": 2},
        "mesh.pp=2 x mesh.virtual_stages=2 = 4 stages need a MoE block each, but the model has 2; use fewer stages",
    ),
    (
        {"mesh.pp": 2, "mesh.weights": "fsdp"},
        "mesh.weights=fsdp would gather weights in every tick of a pipeline; use resident or mesh.pp=1",
    ),
    (
        {"mesh.pp": 2, "model.recompute": "offload"},
        "model.recompute=offload keeps results in host memory for one microbatch, but a pipeline has several under way; "
        "use block or selective, or mesh.pp=1",
    ),
    (
        {"mesh.pp": 2, "debug_nans": True},
        "debug_nans=True looks at whole models, but mesh.pp=2; resume the run with mesh.pp=1, on any mesh it fits",
    ),
    below("mesh.dp", 0, 1),
    below("mesh.ep", 0, 1),
    misspelled("mesh.weights", "fsdp2", "resident, fsdp", "fsdp"),
    below("checkpoint.every", 0, 1),
    below("checkpoint.keep", 0, 1),
    below("checkpoint.keep_every", 0, 1),
    (
        {"checkpoint.keep_every": 700, "checkpoint.every": 500},
        "checkpoint.keep_every=700 is not a multiple of checkpoint.every=500, so that most of these steps are never saved; "
        "use a multiple, such as 1000",
    ),
    below("eval.every", 0, 1),
    below("eval.sequences", 0, 1),
    below("eval.batch_size", 0, 1),
    below("log.every", 0, 1),
    below("log.profile_start", -1, 0),
    below("log.profile_steps", 0, 1),
    ({"name": "a/b"}, "name='a/b' is not a directory name; use letters, digits, - and _"),
    below("steps", 0, 1),
    below("batch_size", 0, 1),
    below("microbatches", 0, 1),
    ({"steps": 2**31}, "steps=2147483648 is not below 2**31, what a device counts in 32 bits; use 2147483647 at most"),
    ({"seed": 2**31}, "seed=2147483648 is not in [0, 2**31), what a device counts in 32 bits; choose a seed from 0 to 2147483647"),
    ({"seed": -1}, "seed=-1 is not in [0, 2**31), what a device counts in 32 bits; choose a seed from 0 to 2147483647"),
    (
        {"batch_size": 10, "mesh.dp": 2, "microbatches": 2},
        "batch_size=10 does not split evenly into microbatches=2 x mesh.dp=2 x mesh.ep=1 = 4 parts; use a multiple of 4, such as 12, "
        "or microbatches=1",
    ),
    (
        {"batch_size": 10, "mesh.dp": 4},
        "batch_size=10 does not split evenly into microbatches=1 x mesh.dp=4 x mesh.ep=1 = 4 parts; use a multiple of 4, such as 12",
    ),
    (
        {"eval.batch_size": 6, "mesh.dp": 2, "mesh.ep": 2},
        "eval.batch_size=6 does not split over mesh.dp=2 x mesh.ep=2; use a multiple of 4",
    ),
    (
        {"mesh.ep": 16},
        "mesh.ep=16 does not divide model.moe.num_experts=8; choose a divisor of 8 or change model.moe.num_experts",
    ),
    (
        {"mesh.ep": 2, "model.moe": None, "model.num_dense_layers": 3},
        "mesh.ep=2 splits experts, but the model has none; use mesh.dp",
    ),
]

ENUMS = [
    misspelled("model.attention.qk_norm", "heads", "none, head, width", "head"),
    misspelled("model.attention.implementation", "cuda", "auto, xla, cudnn", "cudnn"),
    misspelled("model.moe.router.gating", "sofmax", "softmax, sigmoid, topk_softmax", "softmax"),
    misspelled("model.moe.router.assignment", "learnt", "learned, uniform, random", "learned"),
    misspelled("model.moe.router.balance_loss", "locale", "none, local, instance, global", "local"),
    misspelled("model.moe.transport", "raged", "auto, ragged, gather, dense, ring", "ragged"),
    misspelled("model.moe.grouped_matmul", "cpus", "auto, reference, cpu, mosaic", "cpu"),
    misspelled("model.norm_placement", "perry", "pre, post, peri", "peri"),
    misspelled("model.dtype", "bf16loat", "float32, bfloat16", "bfloat16"),
    misspelled("model.precision", "mxfp4", "plain, mxfp8", "mxfp8"),
    misspelled("model.recompute", "blocks", "none, block, selective, offload", "block"),
    (
        {"model.recompute_keep": ("qkv",), "model.recompute": "block"},
        "model.recompute_keep=('qkv',) has no effect with model.recompute=block; use selective or offload, or leave it out",
    ),
    (
        {"model.recompute_keep": ("qkvs",), "model.recompute": "selective"},
        "model.recompute_keep=('qkvs',) holds 'qkvs', which names no result; the names are block_in, qkv, attention, expert_rows, "
        "expert_gate_up, expert_out, shared_gate_up, mlp_gate_up",
    ),
    (
        {"model.recompute_keep": ("mlp_gate_up",), "model.recompute": "offload", "model.num_dense_layers": 0, "model.mlp_dim": 0},
        "model.recompute_keep=('mlp_gate_up',) holds 'mlp_gate_up', but this model has none; its results are block_in, qkv, attention, "
        "expert_rows, expert_gate_up, expert_out, shared_gate_up",
    ),
    misspelled("data.source", "file", "shakespeare, files, synthetic", "files"),
    misspelled("data.token_dtype", "uint24", "uint8, uint16, uint32, uint64", "uint64"),
    misspelled("optim.schedule.kind", "cosin", "cosine, wsd, constant", "cosine"),
    misspelled("resume", "change", "auto, changed, never", "changed"),
]

TABLE = [*ATTENTION, *EXPERTS, *MODEL, *DATA, *OPTIM, *RUN, *ENUMS]


@pytest.mark.parametrize(("changes", "message"), TABLE, ids=[f"{'+'.join(case[0])}={next(iter(case[0].values()))}" for case in TABLE])
def test_broken_rule_names_setting_value_rule_and_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        change(base(), changes)
    assert str(caught.value) == message
    assert "; " in message, "the way out stands behind a semicolon"


def test_every_rule_of_the_configs_is_in_the_table() -> None:
    broken = set()
    for changes, _ in TABLE:
        with pytest.raises(ConfigError) as caught:
            change(base(), changes)
        frames = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename in FILES]
        broken.add((frames[-1].filename, frames[-1].lineno))
    assert _rules() - broken == set()


def _rules() -> set[tuple[str, int]]:
    """File and line of every call of a check in the config files."""
    names = {"check", "at_least", "divides", "one_of"}
    calls = set()
    for file in FILES:
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                calls.add((file, node.lineno))
    return calls
