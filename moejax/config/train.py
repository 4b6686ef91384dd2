"""What a run is: data, batch, optimizer, mesh, saving and logging. Standard library only."""

import math
from dataclasses import dataclass, field
from typing import Literal

from moejax.config.check import at_least, check, divides, one_of
from moejax.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    pp: int = 1
    """Pipeline stages (outermost axis): each holds an equal part of the MoE blocks."""
    virtual_stages: int = 1
    """Parts of the model on each pipeline rank; 2 or more interleave them, for a smaller bubble. Needs mesh.pp > 1."""
    schedule: str = "auto"
    """Order of pipeline passes. auto: 1f1b, or interleaved if virtual_stages > 1. moejax show-schedule draws them, and its help says which
    of them train."""
    dp: int = 1
    """Data-parallel replicas of the experts."""
    ep: int = 1
    """Ranks that split the experts of a layer (innermost axis: one NVLink domain). Dense layers use dp x ep as data axes."""
    weights: Literal["resident", "fsdp"] = "resident"
    """resident: whole weights stay on the devices that use them. fsdp: shards, gathered layer by layer in every microbatch (a baseline)."""

    def __post_init__(self) -> None:
        for name in ("pp", "virtual_stages", "dp", "ep"):
            at_least(f"mesh.{name}", getattr(self, name), 1)
        one_of("mesh.weights", self.weights, ("resident", "fsdp"))
        check(
            self.schedule == "auto" or self.pp > 1,
            f"mesh.schedule={self.schedule} orders the passes of a pipeline, but mesh.pp={self.pp}; set mesh.schedule=auto",
        )
        check(
            self.virtual_stages == 1 or self.pp > 1,
            f"mesh.virtual_stages={self.virtual_stages} splits pipeline ranks, but mesh.pp={self.pp}; set mesh.virtual_stages=1",
        )

    @property
    def num_devices(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def data_ranks(self) -> int:
        """Parts that the sequences of a microbatch are split into."""
        return self.dp * self.ep

    @property
    def schedule_name(self) -> str:
        """The schedule behind auto."""
        return self.schedule if self.schedule != "auto" else "1f1b" if self.virtual_stages == 1 else "interleaved"

    @property
    def words(self) -> str:
        """The axes as settings are typed; stages only where there are some."""
        return f"mesh.pp={self.pp} x " * (self.pp > 1) + f"mesh.dp={self.dp} x mesh.ep={self.ep}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: Literal["shakespeare", "files", "synthetic"] = "shakespeare"
    """shakespeare: the text shipped with moejax, as bytes. files: your own token files, see paths. synthetic: endless made-up tokens of
    any vocabulary, for benchmarks."""
    paths: tuple[str, ...] = ()
    """Token files, read in this order: real .npy arrays, or headerless ones (dtype from token_dtype) as Olmo-core writes them."""
    token_dtype: Literal["uint8", "uint16", "uint32", "uint64"] = "uint16"
    """Item type of headerless token files; a real .npy file knows its own."""
    eos_id: int | None = None
    """Token id that ends a document in token files. None: one endless document."""
    seq_len: int = 128
    """Tokens of one training sequence."""
    document_mask: bool = False
    """Attention stays inside a document, positions restart there, and no label crosses its end."""
    max_documents: int = 64
    """With document_mask and cuDNN attention: documents of one sequence at most, its padding counted as one. More stop the run. Each costs
    num_heads x seq_len x 4 bytes for a layer and sequence."""
    eval_fraction: float = 0.05
    """Share of the tokens, at the end of the corpus, held out for evaluation."""

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("shakespeare", "files", "synthetic"))
        one_of("data.token_dtype", self.token_dtype, ("uint8", "uint16", "uint32", "uint64"))
        at_least("data.seq_len", self.seq_len, 1)
        at_least("data.max_documents", self.max_documents, 1)
        check(
            (self.source == "files") == bool(self.paths),
            f"data.source={self.source} with data.paths={self.paths}; give paths exactly when source is files",
        )
        check(0 <= self.eval_fraction < 1, f"data.eval_fraction={self.eval_fraction} is not in [0, 1); 0.05 is usual")
        check(
            self.source == "files" or self.eos_id is None,
            f"data.eos_id={self.eos_id} is for token files, but data.source={self.source} knows its own; leave data.eos_id out",
        )
        check(
            not (self.document_mask and self.source == "files" and self.eos_id is None),
            "data.document_mask=True needs to know where documents end; set data.eos_id",
        )

    @property
    def documents(self) -> int:
        """Documents of a sequence at most, as far as attention has to tell them apart."""
        return self.max_documents if self.document_mask else 1


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to the end, warm-up-stable-decay (linear decay at the end), or constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    decay_steps: int = 0
    """wsd only: steps of the linear decay at the end."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a fraction of the peak (not used by constant)."""

    def __post_init__(self) -> None:
        one_of("optim.schedule.kind", self.kind, ("cosine", "wsd", "constant"))
        at_least("optim.schedule.warmup_steps", self.warmup_steps, 0)
        at_least("optim.schedule.decay_steps", self.decay_steps, 0)
        check(
            (self.kind == "wsd") == (self.decay_steps > 0),
            f"optim.schedule.kind={self.kind} with optim.schedule.decay_steps={self.decay_steps}; wsd needs decay_steps > 0, the others 0",
        )
        check(0 <= self.final_fraction <= 1, f"optim.schedule.final_fraction={self.final_fraction} is not in [0, 1]; 0.1 is usual")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate."""
    no_decay: tuple[str, ...] = ("embed.*", "*norm*")
    """Parameter names (globs over dotted names) without weight decay. Each must match something."""
    expert_lr_scale: float = 1.0
    """Routed experts' learning rate as a multiple of lr."""
    expert_weight_decay: float | None = None
    """Routed experts' weight decay. None: weight_decay."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm to clip to. None: no clipping."""
    skip_sigma: float | None = 6.0
    """Skip a step whose loss or gradient norm is this many deviations above the mean of skip_window steps. None: only non-finite ones."""
    skip_window: int = 128
    """Steps remembered for skip_sigma; skipping starts when half of them are known."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over time."""

    def __post_init__(self) -> None:
        check(self.lr > 0, f"optim.lr={self.lr} is not positive; 1e-3 to 1e-4 is usual")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"optim.{name}={value} is not in [0, 1); 0.9 and 0.95 are usual")
        check(self.eps > 0, f"optim.eps={self.eps} is not positive; 1e-8 is usual")
        for name in ("weight_decay", "expert_weight_decay", "expert_lr_scale"):
            value = getattr(self, name)
            check(value is None or value >= 0, f"optim.{name}={value} is negative; give a number >= 0")
        check(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"optim.max_grad_norm={self.max_grad_norm} is not positive; use None for no clipping",
        )
        check(
            self.skip_sigma is None or self.skip_sigma > 0, f"optim.skip_sigma={self.skip_sigma} is not positive; use None to switch it off"
        )
        at_least("optim.skip_window", self.skip_window, 4)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 500
    """Steps between checkpoints; one is always written at the end and on Ctrl-C or SIGTERM."""
    keep: int = 3
    """Newest checkpoints that stay on disk."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay for good. None: only the newest stay."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep", self.keep, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)
            check(
                self.keep_every % self.every == 0,
                f"checkpoint.keep_every={self.keep_every} is not a multiple of checkpoint.every={self.every}, so that most of these steps "
                f"are never saved; use a multiple, such as {math.ceil(self.keep_every / self.every) * self.every}",
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: int | None = 500
    """Steps between evaluations on the held-out split; one is made at the end too. None: never."""
    sequences: int = 256
    """Held-out sequences of one evaluation at most; the same ones every time, drawn from the whole split."""
    batch_size: int | None = None
    """Sequences evaluated at once. None: one microbatch of training."""

    def __post_init__(self) -> None:
        if self.every is not None:
            at_least("eval.every", self.every, 1)
        at_least("eval.sequences", self.sequences, 1)
        if self.batch_size is not None:
            at_least("eval.batch_size", self.batch_size, 1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = 10
    """Steps between lines of metrics."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run directory (extra: tensorboard)."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (extra: wandb)."""
    profile_start: int = 5
    """With --profile: first step of the trace, counted from the start of this process."""
    profile_steps: int = 3
    """With --profile: steps in the trace."""

    def __post_init__(self) -> None:
        at_least("log.every", self.every, 1)
        at_least("log.profile_start", self.profile_start, 0)
        at_least("log.profile_steps", self.profile_steps, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    name: str
    """Name of the run; its directory is runs/NAME unless run_dir says otherwise."""
    steps: int
    """Optimizer steps of the whole run."""
    batch_size: int
    """Sequences of one step over all devices and microbatches."""
    microbatches: int = 1
    """Parts that a step's batch is split into; gradients add up over them."""
    seed: int = 0
    """Seed of initial weights, data order and random routing."""
    model: ModelConfig
    """The network."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices and how work is split over them."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training and held-out text."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """When to evaluate."""
    log: LogConfig = field(default_factory=LogConfig)
    """What to report."""
    run_dir: str | None = None
    """Directory of the run. None: runs/NAME."""
    resume: Literal["auto", "changed", "never"] = "auto"
    """auto: continue the run in run_dir if it has this config. changed: also if settings differ. never: refuse a used directory."""
    profile: bool = False
    """Write a jax.profiler trace of a few steps into the run directory."""
    debug_nans: bool = False
    """Stop at the first step whose loss or gradient is not finite, and say in which layer and result it begins. Waits for every step."""

    def __post_init__(self) -> None:
        check(
            self.name not in ("", ".", "..") and "/" not in self.name,
            f"name={self.name!r} is not a directory name; use letters, digits, - and _",
        )
        at_least("steps", self.steps, 1)
        check(self.steps < 2**31, f"steps={self.steps} is not below 2**31, what a device counts in 32 bits; use 2147483647 at most")
        at_least("batch_size", self.batch_size, 1)
        at_least("microbatches", self.microbatches, 1)
        check(
            0 <= self.seed < 2**31,
            f"seed={self.seed} is not in [0, 2**31), what a device counts in 32 bits; choose a seed from 0 to 2147483647",
        )
        one_of("resume", self.resume, ("auto", "changed", "never"))
        if self.model.moe is not None:
            divides("mesh.ep", self.mesh.ep, "model.moe.num_experts", self.model.moe.num_experts)
        else:
            check(self.mesh.ep == 1, f"mesh.ep={self.mesh.ep} splits experts, but the model has none; use mesh.dp")
        self._check_pipeline()
        parts, whole = self.microbatches * self.mesh.data_ranks, self.batch_size // self.mesh.data_ranks
        fewer = next((n for n in range(min(self.microbatches, whole), 0, -1) if self.batch_size % (n * self.mesh.data_ranks) == 0), None)
        check(
            self.batch_size % parts == 0,
            f"batch_size={self.batch_size} does not split evenly into microbatches={self.microbatches} x mesh.dp={self.mesh.dp} "
            f"x mesh.ep={self.mesh.ep} = {parts} parts; use a multiple of {parts}, such as {math.ceil(self.batch_size / parts) * parts}"
            + (f", or microbatches={fewer}" if fewer else ""),
        )
        if self.eval.batch_size is not None:
            check(
                self.eval.batch_size % self.mesh.data_ranks == 0,
                f"eval.batch_size={self.eval.batch_size} does not split over mesh.dp={self.mesh.dp} x mesh.ep={self.mesh.ep}; "
                f"use a multiple of {self.mesh.data_ranks}",
            )
        check(
            self.eval.every is None or self.data.eval_fraction > 0,
            f"eval.every={self.eval.every} has no text to evaluate on with data.eval_fraction=0; "
            "hold out a share such as 0.05, or set eval.every=None",
        )
        warm, decay = self.optim.schedule.warmup_steps, self.optim.schedule.decay_steps
        check(
            warm + decay <= self.steps,
            f"optim.schedule.warmup_steps={warm} + optim.schedule.decay_steps={decay} exceed steps={self.steps}; "
            "train longer or shorten them",
        )
        if self.data.source == "shakespeare":
            check(
                self.model.vocab_size >= 258,
                f"model.vocab_size={self.model.vocab_size} is below 258, what the byte tokenizer needs "
                "(256 bytes, end of document, padding); use 258 or more",
            )

    def _check_pipeline(self) -> None:
        check(
            not (self.debug_nans and self.mesh.pp > 1),
            f"debug_nans=True looks at whole models, but mesh.pp={self.mesh.pp}; resume the run with mesh.pp=1, on any mesh it fits",
        )
        stages = self.mesh.pp * self.mesh.virtual_stages
        if stages > 1:
            check(
                stages <= self.model.num_moe_layers,
                f"mesh.pp={self.mesh.pp} x mesh.virtual_stages={self.mesh.virtual_stages} = {stages} stages need a MoE block each, but the "
                f"model has {self.model.num_moe_layers}; use fewer stages",
            )
            check(
                self.mesh.weights == "resident",
                "mesh.weights=fsdp would gather weights in every tick of a pipeline; use resident or mesh.pp=1",
            )
            check(
                self.model.recompute != "offload",
                "model.recompute=offload keeps results in host memory for one microbatch, but a pipeline has several under way; "
                "use block or selective, or mesh.pp=1",
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch over all devices."""
        return self.batch_size // self.microbatches
