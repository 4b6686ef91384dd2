"""Every transport puts rows where a plain NumPy loop puts them and brings them back, and has the gradients of that loop.

`ragged` needs GPUs; here it runs as tests/parallel/ragged_model.py. The last transport is an example of how to add one.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig
from moejax.parallel import make_mesh
from moejax.parallel.expert.plan import make_plan, row_sources
from moejax.parallel.expert.transports import LOCAL, TRANSPORTS, row_transport, take_or_zero
from moejax.testing import assert_trees_close
from tests.oracle import kept_routes
from tests.oracle.capacity import capacity
from tests.parallel.ragged_model import ragged_all_to_all
from tests.parallel.routing import routing

EXPERTS, TOKENS, TOP_K, DIM, TILE = 8, 6, 3, 4, 8
KINDS = ("even", "skewed", "padded", "one")
RANKS = P("ep")


def _carousel_prepare(plan, axis):
    source, place, is_real = row_sources(plan)
    expert = plan.expert[plan.place]
    row = plan.send_start[expert] + plan.place - plan.send_offset[expert]
    local = plan.group_sizes.shape[0]
    return jnp.where(is_real, source, -1), place, jnp.where(plan.kept, expert // local, -1), row


def _carousel(x, owner, index, axis):
    """Pass x around the ranks, one hop at a time; everyone takes what is wanted of each owner's."""
    ranks, me = lax.axis_size(axis), lax.axis_index(axis)
    taken = jnp.zeros((owner.shape[0], x.shape[1]), x.dtype)
    for hop in range(ranks):
        here = owner == (me - hop) % ranks
        taken = taken + take_or_zero(x, jnp.where(here, index, x.shape[0]))
        x = lax.ppermute(x, axis, [(rank, (rank + 1) % ranks) for rank in range(ranks)])
    return taken


CAROUSEL = row_transport(
    "carousel",
    there=lambda routes, plan, moves, axis: _carousel(routes, moves[0], moves[1], axis),
    back=lambda y, plan, moves, axis: _carousel(y, moves[2], moves[3], axis),
    prepare=_carousel_prepare,
)
"""A whole transport. Named in table.py and in MoEConfig.transport it could be chosen by a config."""

BY_NAME = TRANSPORTS | {"local": LOCAL, "carousel": CAROUSEL}


def limit_of(ep: int, factor: float | None) -> int:
    """Rows that a rank accepts; without a factor, the worst case."""
    return ep * TOKENS * min(TOP_K, EXPERTS // ep) if factor is None else capacity(factor, TOKENS, TOP_K)


@functools.lru_cache
def moved(transport: str, ep: int, factor: float | None, dtype: str):
    """Jitted: both moves of a transport and their gradients, on ep ranks."""
    mesh, chosen = make_mesh(MeshConfig(ep=ep)), BY_NAME[transport]

    def run(experts, arrays):
        plan = make_plan(experts, num_experts=EXPERTS, capacity=limit_of(ep, factor), tile=TILE, axis="ep")
        moves = chosen.prepare(plan, "ep")
        rows, dispatch_back = jax.vjp(lambda x: chosen.dispatch(x, plan, moves, "ep"), arrays["x"])
        out, combine_back = jax.vjp(lambda y, w: chosen.combine(y, w, plan, moves, "ep"), arrays["y"], arrays["weights"])
        (dx,), (dy, dw) = dispatch_back(arrays["d_rows"]), combine_back(arrays["d_out"])
        return {"rows": rows, "dx": dx, "out": out, "dy": dy, "dw": dw}

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=RANKS, out_specs=RANKS, check_vma=False))


def buffer_rows_of(ep: int, factor: float | None) -> int:
    """Rows of a receive buffer, by compiling nothing: the plan's static size."""
    run = jax.shard_map(
        lambda e: jnp.zeros((make_plan(e, num_experts=EXPERTS, capacity=limit_of(ep, factor), tile=TILE, axis="ep").rows,)),
        mesh=make_mesh(MeshConfig(ep=ep)),
        in_specs=RANKS,
        out_specs=RANKS,
        check_vma=False,
    )
    return jax.eval_shape(run, jax.ShapeDtypeStruct((ep * TOKENS, TOP_K), jnp.int32)).shape[0] // ep


def example(kind: str, ep: int, factor: float | None, dtype: str):
    """Experts with padding marked, which routes are kept, and random arrays in the dtype; pad rows hold numbers too."""
    experts, real = routing(kind, ep, seed=ep, tokens=TOKENS, top_k=TOP_K)
    kept = kept_routes(experts, real, num_experts=EXPERTS, capacity_factor=factor)
    rng, rows = np.random.default_rng(3), buffer_rows_of(ep, factor)
    shapes = {"x": (TOKENS, DIM), "d_out": (TOKENS, DIM), "y": (rows, DIM), "d_rows": (rows, DIM)}
    arrays = {name: jnp.asarray(rng.normal(size=(ep, *shape)), dtype) for name, shape in shapes.items()}
    arrays["weights"] = jnp.asarray(rng.random((ep, TOKENS, TOP_K)), "float32")
    return np.where(real[..., None], experts, EXPERTS), kept, arrays


def plain(experts: np.ndarray, kept: np.ndarray, arrays: dict) -> dict[str, np.ndarray]:
    """The same by loops over rows in float64: local expert by local expert, source rank by source rank, route by route."""
    ep = len(experts)
    a = {name: np.asarray(value.astype(jnp.float32)).astype(np.float64) for name, value in arrays.items()}
    truth = {name: np.zeros_like(a[like]) for name, like in (("rows", "y"), ("dx", "x"), ("out", "x"), ("dy", "y"), ("dw", "weights"))}
    for owner in range(ep):
        row = 0
        for expert in range(owner * EXPERTS // ep, (owner + 1) * EXPERTS // ep):
            row = -(-row // TILE) * TILE
            for source, token, slot in itertools.product(range(ep), range(TOKENS), range(TOP_K)):
                if kept[source, token, slot] and experts[source, token, slot] == expert:
                    weight = a["weights"][source, token, slot]
                    truth["rows"][owner, row] = a["x"][source, token]
                    truth["dx"][source, token] += a["d_rows"][owner, row]
                    truth["out"][source, token] += weight * a["y"][owner, row]
                    truth["dy"][owner, row] = weight * a["d_out"][source, token]
                    truth["dw"][source, token, slot] = a["y"][owner, row] @ a["d_out"][source, token]
                    row += 1
    return truth


def compare(transport: str, ep: int, factor: float | None, dtype: str) -> None:
    for kind in KINDS:
        experts, kept, arrays = example(kind, ep, factor, dtype)
        flat = jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), (experts, arrays))
        got = jax.tree.map(lambda v: np.asarray(v.astype(jnp.float32)), moved(transport, ep, factor, dtype)(*flat))
        truth = {name: value.reshape(got[name].shape) for name, value in plain(experts, kept, arrays).items()}
        what = f"{transport} ep={ep} capacity={factor} {dtype} {kind}"
        np.testing.assert_array_equal(got["rows"], truth["rows"], err_msg=f"{what}: rows, which are copies")
        for name in ("dy", "dw"):
            assert not got[name][truth[name] == 0].any(), f"{what}: {name} of rows and routes that do not exist"
        assert_trees_close(got, truth, dtype, what)


SHORT = [
    ("ragged", 8, 1.25, "bfloat16"),
    ("gather", 2, None, "float32"),
    ("dense", 8, 0.5, "float32"),
    ("ring", 4, 0.5, "bfloat16"),
    ("local", 1, 1.25, "float32"),
    ("carousel", 4, 0.5, "float32"),
]
"""Every transport once, and every level of the other factors."""
LEVELS = (tuple(TRANSPORTS), (1, 2, 4, 8), (1.25, 0.5, None), ("float32", "bfloat16"))
# Whether bfloat16 is rounded as it should be does not depend on the capacity.
ALL = [case for case in itertools.product(*LEVELS) if case[2] == 0.5 or case[3] == "float32"]
ALL += [("local", 1, 0.5, "float32"), ("local", 1, None, "bfloat16")]
ids = {"ids": str}


@pytest.fixture(autouse=True)
def ragged_on_cpu(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)


@pytest.mark.parametrize(("transport", "ep", "factor", "dtype"), SHORT, **ids)
def test_p17_rows_outputs_and_gradients_are_those_of_the_plain_loop(transport, ep, factor, dtype):
    compare(transport, ep, factor, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "ep", "factor", "dtype"), [case for case in ALL if case not in SHORT], **ids)
def test_every_transport_size_and_capacity(transport, ep, factor, dtype):
    compare(transport, ep, factor, dtype)


SENT = {
    "ragged": ["ragged_all_to_all R", "ragged_all_to_all R", "ragged_all_to_all rows", "ragged_all_to_all rows"],
    "gather": ["all_gather R", "all_gather R", "all_gather rows", "all_gather rows"],
    "dense": ["all_to_all ep*pair"] * 4,
    "ring": ["all_gather T", "all_gather T", "reduce_scatter ep*T", "reduce_scatter ep*T"],
    "local": [],
}
"""Collectives on rows of full width in one forward and backward pass, with the rows that a rank puts in."""


@pytest.mark.parametrize("transport", SENT)
def test_a_transport_sends_what_its_readme_says_and_counts_once(transport, monkeypatch):
    monkeypatch.undo()  # the real operation can be traced anywhere; no other test has this capacity, so none gets its trace
    ep = 1 if transport == "local" else 4
    rows = buffer_rows_of(ep, 2.0)
    sizes = {"R": TOKENS * TOP_K, "T": TOKENS, "rows": rows, "ep*T": ep * TOKENS, "ep*pair": ep * TOKENS * min(TOP_K, EXPERTS // ep)}
    experts, _, arrays = example("even", ep, 2.0, "float32")
    flat = jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), (experts, arrays))
    found = list(collectives(moved(transport, ep, 2.0, "float32").trace(*flat).jaxpr.jaxpr))
    assert sorted(line for line in found if line[1][-1] == DIM and len(line[1]) == 2) == sorted(
        (name.split()[0], (sizes[name.split()[1]], DIM)) for name in SENT[transport]
    )
    assert found.count(("all_gather", (EXPERTS,))) == (ep > 1)


def collectives(jaxpr):
    """(name, shape of what goes in) of every collective, those of inner jaxprs once."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psum", "ppermute"):
            yield eqn.primitive.name, eqn.invars[0].aval.shape
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from collectives(inner)


def test_the_model_of_ragged_all_to_all_has_its_signature():
    from jax._src.lax.parallel import ragged_all_to_all as real

    assert list(inspect.signature(ragged_all_to_all).parameters) == list(inspect.signature(real).parameters)[:7]
