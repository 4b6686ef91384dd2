"""Times of dispatch and combine over a mesh, as the rate at which rows leave a rank beside what its link can carry."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.parallel.expert.choice import choose_transport
from moejax.parallel.expert.plan import make_plan, portion
from moejax_kernels.timing import interleaved_medians

SLOW_SHARE = 0.2
"""Share of the link below which a transport does not do what it is for."""


@dataclass(frozen=True)
class Case:
    """What each rank sends: tokens of a rank, and the layer that they go to. Experts are drawn evenly."""

    tokens: int
    embed_dim: int
    top_k: int
    num_experts: int
    dtype: str
    capacity_factor: float = 1.25
    tile: int = 128


def measure(case: Case, transports: Iterable[str], mesh: Mesh, *, link: float | None, repeats: int = 15) -> Iterator[dict]:
    """One flat dict for each transport and move; everything is timed in one interleaved run.

    bytes_per_s counts rows of the busiest rank that have to go to another rank, whatever the transport sends for that.
    equal says whether the move gave the bits that the first transport's gave (combine sums in an order of the transport's own, so
    it may differ in the last ones: largest_error is relative to the largest value).

    Args:
        link: bytes/s that leave a rank at most; None if unknown, and link_share with it.
    """
    ranks = mesh.shape["ep"]
    experts, arrays = _inputs(case, ranks)
    programs: dict[tuple[str, str], Callable] = {}
    for name in transports:
        programs |= _programs(case, name, mesh, experts, arrays)
    results = {key: program() for key, program in programs.items()}
    seconds = interleaved_medians({" ".join(key): program for key, program in programs.items()}, repeats)
    first = next(iter(programs))[0]
    sent = _leaving(case, mesh, experts) * case.embed_dim * jnp.dtype(case.dtype).itemsize
    for name, move in programs:
        time_s = seconds[f"{name} {move}"]
        yield {
            **asdict(case),
            "ranks": ranks,
            "device": mesh.devices.flat[0].device_kind,
            "transport": name,
            "move": move,
            "seconds": time_s,
            "sent_bytes": sent,
            "bytes_per_s": sent / time_s,
            "link_share": None if link is None else sent / time_s / link,
            **_difference(results[name, move], results[first, move]),
        }


def slow_link(line: dict) -> str | None:
    """What is wrong with a measured move, as one sentence; None if nothing is, or the link is unknown."""
    share = line["link_share"]
    if share is None or share >= SLOW_SHARE or line["sent_bytes"] == 0:
        return None
    return (
        f"{line['transport']} {line['move']} sends {line['bytes_per_s'] / 1e9:.3g} GB/s a rank, {100 * share:.2g} % of the link, below "
        f"{100 * SLOW_SHARE:.0f} % (a known case: https://github.com/openxla/xla/issues/33386); give it more tokens, or compare the "
        "other transports"
    )


def _inputs(case: Case, ranks: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Random experts of all ranks' tokens, distinct within a token, and the arrays to move; the same whatever the transport."""
    rng, tokens = np.random.default_rng(0), ranks * case.tokens
    scores = rng.random((tokens, case.num_experts), np.float32)
    experts = jnp.asarray(np.argpartition(scores, case.top_k - 1, axis=1)[:, : case.top_k], jnp.int32)
    x = jnp.asarray(rng.standard_normal((tokens, case.embed_dim), np.float32), case.dtype)
    return experts, {"x": x, "weights": jnp.asarray(rng.random((tokens, case.top_k), np.float32))}


def _programs(case: Case, name: str, mesh: Mesh, experts: jax.Array, arrays: dict) -> dict[tuple[str, str], Callable]:
    """Dispatch and combine over a transport, without the plan, which is made here."""
    split, transport = P("ep"), _transport(name, mesh)

    def over_ranks(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))

    def prepare(experts):
        plan = _plan(case, experts)
        return jax.tree.map(lambda leaf: leaf[None], (plan, transport.prepare(plan, "ep")))

    def dispatch(x, moves):
        return transport.dispatch(x, *jax.tree.map(lambda leaf: leaf[0], moves), "ep")

    def combine(y, weights, moves):
        return transport.combine(y, weights, *jax.tree.map(lambda leaf: leaf[0], moves), "ep")

    moves = over_ranks(prepare)(experts)
    dispatched, combined = over_ranks(dispatch), over_ranks(combine)
    rows = dispatched(arrays["x"], moves)
    return {
        (name, "dispatch"): lambda: dispatched(arrays["x"], moves),
        (name, "combine"): lambda: combined(rows, arrays["weights"], moves),
    }


def _transport(name: str, mesh: Mesh):
    """The transport, chosen for the mesh's devices."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return choose_transport(name, mesh.shape["ep"])


def _plan(case: Case, experts):
    ranks = jax.lax.axis_size("ep")
    part = portion(tokens=case.tokens, top_k=case.top_k, num_experts=case.num_experts, ranks=ranks, capacity_factor=case.capacity_factor)
    return make_plan(experts, num_experts=case.num_experts, capacity=part.accepted, tile=case.tile, axis="ep")


def _leaving(case: Case, mesh: Mesh, experts: jax.Array) -> int:
    """Rows that the busiest rank sends to others."""

    def count(experts):
        plan, me = _plan(case, experts), jax.lax.axis_index("ep")
        by_peer = plan.send_size.reshape(mesh.shape["ep"], -1).sum(axis=1)
        return (by_peer.sum() - by_peer[me])[None]

    mapped = jax.shard_map(count, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return int(jax.jit(mapped)(experts).max())


def _difference(ours: jax.Array, theirs: jax.Array) -> dict:
    """How far a result is from another, compared on the devices."""

    def compare(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.all(a == b), jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))

    equal, error = jax.jit(compare)(ours, theirs)
    return {"equal": bool(equal), "largest_error": float(error)}
