"""What one MoE layer sends in one microbatch, by transport; bytes of one rank, counted as its collectives carry them.

T tokens of width D, R = T * top_k routes, `rows` of the receive buffer, C rows that one rank can send another at most:

              there                     back                      and
    ragged    R rows                    R rows
    gather    all ranks' R rows         all ranks' buffers
    dense     ep * C rows               ep * C rows
    ring      all ranks' T tokens       ep * T float32 sums       all ranks' places and weights of routes, gradients of weights

Dispatch and the gradient of combine go there, combine and the gradient of dispatch come back. Before them all ranks' counts are gathered.
"""

from collections.abc import Iterator
from typing import NamedTuple

from moejax.config import MoEConfig, TrainConfig
from moejax.parallel.expert.plan import Portion, portion
from moejax_kernels.grouped_matmul import buffer_rows

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
HLO_NAME = {"float32": "f32", "bfloat16": "bf16"}
TILE = 128
"""Rows of a tile of the grouped matmul on GPUs."""


class Move(NamedTuple):
    """One collective over ep. dtype: as HLO prints it. payload: bytes of the whole array."""

    kind: str
    dtype: str
    payload: int


def tokens(config: TrainConfig) -> int:
    """Tokens of one GPU in one microbatch."""
    return config.microbatch_size // config.mesh.data_ranks * config.data.seq_len


def transport_of(config: TrainConfig) -> str:
    """The transport of a run on GPUs by name; local on one rank. Auto takes ragged there."""
    moe = _moe(config)
    return "local" if config.mesh.ep == 1 else "ragged" if moe.transport == "auto" else moe.transport


def portion_of(config: TrainConfig) -> Portion:
    """Chunks that a rank's tokens go through a layer in, and what its buffer holds of one."""
    moe = _moe(config)
    return portion(
        tokens=tokens(config),
        top_k=moe.top_k,
        num_experts=moe.num_experts,
        ranks=config.mesh.ep,
        capacity_factor=moe.capacity_factor,
    )


def receive_rows(config: TrainConfig, tile: int = TILE) -> int:
    """Rows of the buffer of a layer."""
    return buffer_rows(portion_of(config).accepted, _moe(config).num_experts // config.mesh.ep, tile)


def dispatch_buffer_bytes(config: TrainConfig, tile: int = TILE) -> int:
    """Bytes of that buffer."""
    return receive_rows(config, tile) * _row_bytes(config)


def route_bytes(config: TrainConfig) -> int:
    """Bytes of the rows of a rank's routes, of all chunks."""
    part = portion_of(config)
    return part.chunks * part.tokens * _moe(config).top_k * _row_bytes(config)


def staging_bytes(config: TrainConfig, tile: int = TILE) -> int:
    """What a transport holds at once beside routes and buffer."""
    part, ranks, row = portion_of(config), config.mesh.ep, _row_bytes(config)
    return {
        "gather": 2 * ranks * max(part.tokens * _moe(config).top_k, receive_rows(config, tile)) * row,
        "dense": 2 * ranks * _pair_rows(config) * row,
        "ring": ranks * part.tokens * (row + 4 * config.model.embed_dim),
    }.get(transport_of(config), 0)


def forward_moves(config: TrainConfig, tile: int = TILE) -> Iterator[Move]:
    """Every collective of a layer's forward pass."""
    there, back = _there(config), _back(config, tile)
    for _ in range(portion_of(config).chunks):
        yield from (*_planning(config), there, *_weights(config), back)


def training_moves(config: TrainConfig, tile: int = TILE) -> Iterator[Move]:
    """Every collective of a layer's forward pass, its backward pass, and what that computes again."""
    there, back, model = _there(config), _back(config, tile), config.model
    again: list[Move] = []
    if model.recompute != "none":
        again += [] if "expert_rows" in model.kept_residuals else [there]
        if transport_of(config) != "ring":
            again += [] if "expert_out" in model.kept_residuals else [back]
        else:  # rows are kept before the sum over ranks, which a norm behind it wants again
            again += [*_weights(config), *([back] if model.norm_placement in ("post", "peri") else [])]
    gradient = [Move("reduce-scatter", "f32", _weight_bytes(config))] if transport_of(config) == "ring" else []
    for _ in range(portion_of(config).chunks):
        yield from (*_planning(config), there, *_weights(config), back, *again, there, *gradient, back)


def _there(config: TrainConfig) -> Move:
    part, ranks, row, dtype = portion_of(config), config.mesh.ep, _row_bytes(config), HLO_NAME[config.model.dtype]
    routes = part.tokens * _moe(config).top_k
    return {
        "ragged": Move("ragged-all-to-all", dtype, routes * row),
        "gather": Move("all-gather", dtype, ranks * routes * row),
        "dense": Move("all-to-all", dtype, ranks * _pair_rows(config) * row),
        "ring": Move("all-gather", dtype, ranks * part.tokens * row),
    }[transport_of(config)]


def _back(config: TrainConfig, tile: int) -> Move:
    name, row, dtype = transport_of(config), _row_bytes(config), HLO_NAME[config.model.dtype]
    if name == "gather":
        return Move("all-gather", dtype, config.mesh.ep * receive_rows(config, tile) * row)
    if name == "ring":
        return Move("reduce-scatter", "f32", config.mesh.ep * portion_of(config).tokens * 4 * config.model.embed_dim)
    return _there(config)


def _planning(config: TrainConfig) -> list[Move]:
    """Counts of every expert, and for ring the place of every route."""
    moves = [Move("all-gather", "s32", 4 * config.mesh.ep * _moe(config).num_experts)]
    return moves + [Move("all-gather", "s32", _weight_bytes(config))] * (transport_of(config) == "ring")


def _weights(config: TrainConfig) -> list[Move]:
    return [Move("all-gather", "f32", _weight_bytes(config))] * (transport_of(config) == "ring")


def _weight_bytes(config: TrainConfig) -> int:
    """Of 32 bits for each route of all ranks."""
    return 4 * config.mesh.ep * portion_of(config).tokens * _moe(config).top_k


def _pair_rows(config: TrainConfig) -> int:
    """Rows that a rank can send another at most, as `moejax.parallel.expert.plan` says."""
    part, moe = portion_of(config), _moe(config)
    return min(part.accepted, part.tokens * min(moe.top_k, moe.num_experts // config.mesh.ep))


def _row_bytes(config: TrainConfig) -> int:
    return config.model.embed_dim * ITEM_BYTES[config.model.dtype]


def _moe(config: TrainConfig) -> MoEConfig:
    assert config.model.moe is not None
    return config.model.moe
