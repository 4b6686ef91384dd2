"""What the network is: sizes, attention, routing, precision. Standard library only."""

from dataclasses import dataclass, field
from typing import Literal

from moejax.config.check import at_least, check, divides, one_of

RESIDUALS = ("block_in", "qkv", "attention", "expert_rows", "expert_gate_up", "expert_out", "shared_gate_up", "mlp_gate_up")
"""Names of the results inside a block that model.recompute_keep may keep, in the order in which they are made."""

SYSTEM_REFERENCE = (
    "model.moe.router.assignment=random or uniform: the router is not trained, so this run is a system reference; "
    "it is no scaling curve, no measure of model quality and no time to quality"
)
"""What holds for every run whose routes are not learned, whatever its loss."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of num_heads (grouped-query attention). None: num_heads."""
    head_dim: int | None = None
    """Width of one head. None: embed_dim / num_heads."""
    rope_theta: float = 500_000.0
    """Base of the rotary position embedding."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMS norm of queries and keys: none, per head, or over the whole width."""
    window_pattern: tuple[int, ...] = (-1,)
    """Sliding window of each layer in tokens (a token sees itself and window-1 before it), repeated over the layers; -1: full attention."""
    full_attention_ends: bool = True
    """The first and the last layer always use full attention."""
    implementation: Literal["auto", "xla", "cudnn"] = "auto"
    """Kernel of training and evaluation: cudnn (bfloat16 on H100, H200, B200, B300), xla (any device and dtype, generation too); auto takes
    cudnn where it runs."""

    def __post_init__(self) -> None:
        at_least("model.attention.num_heads", self.num_heads, 1)
        at_least("model.attention.num_kv_heads", self.kv_heads, 1)
        divides("model.attention.num_kv_heads", self.kv_heads, "model.attention.num_heads", self.num_heads)
        one_of("model.attention.qk_norm", self.qk_norm, ("none", "head", "width"))
        one_of("model.attention.implementation", self.implementation, ("auto", "xla", "cudnn"))
        if self.head_dim is not None:
            check(
                self.head_dim >= 2 and self.head_dim % 2 == 0,
                f"model.attention.head_dim={self.head_dim} is not an even number >= 2; rotary embedding turns pairs",
            )
        check(self.rope_theta > 0, f"model.attention.rope_theta={self.rope_theta} is not positive; the usual base is 10000 or 500000")
        check(len(self.window_pattern) > 0, "model.attention.window_pattern=() is empty; use -1 for full attention")
        for window in self.window_pattern:
            check(
                window == -1 or window >= 1,
                f"model.attention.window_pattern={self.window_pattern} holds {window}; a window is >= 1 tokens, or -1 for full attention",
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    gating: Literal["softmax", "sigmoid", "topk_softmax"] = "softmax"
    """How logits become scores. topk_softmax: choose by logit, then softmax over the chosen."""
    assignment: Literal["learned", "uniform", "random"] = "learned"
    """learned: by score. uniform, random: fixed routes for benchmarks; such a run is a system reference and says nothing about quality."""
    normalize: float | None = 1.0
    """Divide the chosen weights of a token by their p-norm of this order. None: leave them as they are."""
    restore_scale: bool = False
    """Multiply the weights by top_k after normalising."""
    scale: float = 1.0
    """Constant factor on the weights."""
    bias_update_rate: float | None = None
    """Balancing without a loss: after each step the score-correction bias grows by this times sign(mean(count) - count). None: no bias."""
    balance_loss: Literal["none", "local", "instance", "global"] = "local"
    """Statistic of the balance loss: per rank and microbatch, per sequence, or over all ranks of a microbatch."""
    balance_loss_weight: float = 0.01
    """Weight of the balance loss; 1.0 is the value of a perfectly even load."""
    z_loss_weight: float = 0.0
    """Weight of the mean squared logsumexp of the router logits."""

    def __post_init__(self) -> None:
        one_of("model.moe.router.gating", self.gating, ("softmax", "sigmoid", "topk_softmax"))
        one_of("model.moe.router.assignment", self.assignment, ("learned", "uniform", "random"))
        one_of("model.moe.router.balance_loss", self.balance_loss, ("none", "local", "instance", "global"))
        if self.normalize is not None:
            check(
                1 <= self.normalize <= 16,
                f"model.moe.router.normalize={self.normalize} is not in [1, 16], where a p-norm and its gradient stay finite; "
                "1.0 is usual, None switches it off",
            )
        for name in ("balance_loss_weight", "z_loss_weight"):
            value = getattr(self, name)
            check(value >= 0, f"model.moe.router.{name}={value} is negative; a penalty weight is >= 0")
        if self.bias_update_rate is not None:
            check(
                self.bias_update_rate > 0,
                f"model.moe.router.bias_update_rate={self.bias_update_rate} is not positive; use None to switch the bias off",
            )
        check(
            not (self.assignment == "random" and self.gating == "topk_softmax"),
            "model.moe.router.assignment=random replaces scores, and model.moe.router.gating=topk_softmax has none before the choice; "
            "use gating=softmax or sigmoid",
        )
        check(
            not (self.assignment != "learned" and self.bias_update_rate is not None),
            f"model.moe.router.bias_update_rate={self.bias_update_rate} steers learned routing, but "
            f"model.moe.router.assignment={self.assignment} ignores it; set one of them back",
        )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    num_experts: int
    """Routed experts of a layer, split over mesh.ep."""
    top_k: int
    """Experts that each token is sent to."""
    expert_dim: int
    """Hidden width of one routed expert."""
    num_shared_experts: int = 0
    """Experts that see every token. Two or more are weighted by a scores-only router of their own."""
    shared_expert_dim: int = 0
    """Hidden width of one shared expert; 0 only without shared experts."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How tokens choose experts."""
    capacity_factor: float | None = None
    """Rows a rank accepts per microbatch, in even loads; later rows are dropped and counted. None: dropless, exact for any routing."""
    transport: Literal["auto", "ragged", "gather", "dense", "ring"] = "auto"
    """How rows travel between ranks, with equal results: ragged (ragged all-to-all, GPUs), gather (all-gather), dense (padded
    all-to-all), ring (all-gather of tokens, reduce-scatter of sums). auto: ragged on GPU, gather on CPU."""
    grouped_matmul: Literal["auto", "reference", "cpu", "mosaic"] = "auto"
    """Kernel of the expert products; auto takes mosaic (bfloat16 on H100, H200, B200, B300) or cpu. reference: plain definition, slow."""

    def __post_init__(self) -> None:
        at_least("model.moe.num_experts", self.num_experts, 1)
        at_least("model.moe.top_k", self.top_k, 1)
        check(
            self.top_k <= self.num_experts,
            f"model.moe.top_k={self.top_k} exceeds model.moe.num_experts={self.num_experts}; lower top_k or add experts",
        )
        at_least("model.moe.expert_dim", self.expert_dim, 1)
        at_least("model.moe.num_shared_experts", self.num_shared_experts, 0)
        check(
            (self.num_shared_experts > 0) == (self.shared_expert_dim > 0),
            f"model.moe.num_shared_experts={self.num_shared_experts} and model.moe.shared_expert_dim={self.shared_expert_dim} "
            "do not agree; set both above 0, or both to 0",
        )
        if self.capacity_factor is not None:
            check(
                self.capacity_factor > 0,
                f"model.moe.capacity_factor={self.capacity_factor} is not positive; 1.25 is usual, None never drops",
            )
        one_of("model.moe.transport", self.transport, ("auto", "ragged", "gather", "dense", "ring"))
        one_of("model.moe.grouped_matmul", self.grouped_matmul, ("auto", "reference", "cpu", "mosaic"))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    """Rows of the embedding; every token id is below it."""
    embed_dim: int
    """Width of the residual stream."""
    num_layers: int
    """All blocks, dense ones included."""
    num_dense_layers: int = 0
    """Leading blocks with a dense MLP instead of experts."""
    mlp_dim: int = 0
    """Hidden width of the dense blocks' MLP; 0 only without dense blocks."""
    attention: AttentionConfig
    """Attention of every block."""
    moe: MoEConfig | None
    """Experts of the other blocks; None only if every block is dense."""
    norm_placement: Literal["pre", "post", "peri"] = "pre"
    """RMS norm before each branch, after it (reordered norm), or both."""
    norm_eps: float = 1e-6
    """Added to the mean square inside every norm."""
    embed_scale: float | None = None
    """Factor on the token embeddings. None: 1."""
    embed_norm: bool = False
    """RMS norm after the embedding."""
    tie_embeddings: bool = False
    """The head uses the embedding's weights."""
    init_std: float = 0.02
    """Standard deviation of the initial weights (normal, cut at three deviations)."""
    z_loss_weight: float = 0.0
    """Weight of the mean squared logsumexp of the head's logits."""
    loss_chunk: int = 8192
    """Vocabulary entries whose logits exist at once in the loss."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. Masters, router, norms, softmax, loss and reductions are float32 always."""
    precision: Literal["plain", "mxfp8"] = "plain"
    """plain: every product in dtype. mxfp8: experts, attention projections and the rows between GPUs in MXFP8; can be named in a config
    and planned, not trained yet."""
    recompute: Literal["none", "block", "selective", "offload"] = "none"
    """What the backward pass computes again inside each block: nothing, everything, or all but some named results, which selective keeps on
    the device and offload keeps in pinned host memory. Routing is always kept."""
    recompute_keep: tuple[str, ...] = ()
    """The results that selective or offload keeps, out of block_in, qkv, attention, expert_rows, expert_gate_up, expert_out,
    shared_gate_up, mlp_gate_up. Empty: block_in for offload; for selective attention, expert_rows and expert_out, so that neither
    attention nor transport is done again."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "num_layers", "loss_chunk"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.num_dense_layers", self.num_dense_layers, 0)
        check(
            self.num_dense_layers <= self.num_layers,
            f"model.num_dense_layers={self.num_dense_layers} exceeds model.num_layers={self.num_layers}; lower it or add layers",
        )
        check(
            (self.num_dense_layers > 0) == (self.mlp_dim > 0),
            f"model.num_dense_layers={self.num_dense_layers} and model.mlp_dim={self.mlp_dim} do not agree; set both above 0, or both to 0",
        )
        check(
            (self.moe is None) == (self.num_moe_layers == 0),
            f"model.num_layers={self.num_layers} with model.num_dense_layers={self.num_dense_layers} leaves {self.num_moe_layers} "
            f"MoE blocks, but model.moe is {'not set' if self.moe is None else 'set'}; "
            + ("give model.moe or make every layer dense" if self.moe is None else "set model.moe=None or use fewer dense layers"),
        )
        if self.attention.head_dim is None:
            divides("model.attention.num_heads", self.attention.num_heads, "model.embed_dim", self.embed_dim)
        check(
            self.head_dim % 2 == 0,
            f"model.embed_dim / model.attention.num_heads = {self.head_dim} is odd; rotary embedding turns pairs, "
            "so give an even model.attention.head_dim",
        )
        one_of("model.norm_placement", self.norm_placement, ("pre", "post", "peri"))
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        one_of("model.precision", self.precision, ("plain", "mxfp8"))
        self._check_recompute()
        check(self.norm_eps > 0, f"model.norm_eps={self.norm_eps} is not positive; 1e-6 is usual")
        check(self.init_std > 0, f"model.init_std={self.init_std} is not positive; 0.02 is usual")
        check(self.z_loss_weight >= 0, f"model.z_loss_weight={self.z_loss_weight} is negative; a penalty weight is >= 0")

    def _check_recompute(self) -> None:
        one_of("model.recompute", self.recompute, ("none", "block", "selective", "offload"))
        if not self.recompute_keep:
            return
        setting = f"model.recompute_keep={self.recompute_keep}"
        check(
            self.recompute in ("selective", "offload"),
            f"{setting} has no effect with model.recompute={self.recompute}; use selective or offload, or leave it out",
        )
        for name in self.recompute_keep:
            check(name in RESIDUALS, f"{setting} holds {name!r}, which names no result; the names are {', '.join(RESIDUALS)}")
            check(
                name in self._residuals(),
                f"{setting} holds {name!r}, but this model has none; its results are {', '.join(self._residuals())}",
            )

    def _residuals(self) -> tuple[str, ...]:
        """Named results that blocks of this model have."""
        absent = set() if self.num_dense_layers else {"mlp_gate_up"}
        if self.moe is None:
            absent |= {"expert_rows", "expert_gate_up", "expert_out", "shared_gate_up"}
        elif not self.moe.num_shared_experts:
            absent |= {"shared_gate_up"}
        return tuple(name for name in RESIDUALS if name not in absent)

    @property
    def kept_residuals(self) -> tuple[str, ...]:
        """Named results that the backward pass does not compute again, under model.recompute other than none."""
        if self.recompute_keep:
            return self.recompute_keep
        usual = {"selective": ("attention", "expert_rows", "expert_out"), "offload": ("block_in",)}.get(self.recompute, ())
        return tuple(name for name in usual if name in self._residuals())

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim or self.embed_dim // self.attention.num_heads

    @property
    def is_system_reference(self) -> bool:
        """Whether runs of this model fall under SYSTEM_REFERENCE."""
        return self.moe is not None and self.moe.router.assignment != "learned"

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, -1 for full attention."""
        if self.attention.full_attention_ends and layer in (0, self.num_layers - 1):
            return -1
        return self.attention.window_pattern[layer % len(self.attention.window_pattern)]
