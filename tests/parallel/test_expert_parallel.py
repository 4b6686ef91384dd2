"""The routed layer alone, with given experts and weights: which routes are kept, what comes back, and what is refused."""

import functools
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig, MoEConfig
from moejax.errors import ConfigError
from moejax.parallel import make_mesh
from moejax.parallel.expert import choose_transport, expert_parallel
from moejax.parallel.expert.plan import make_plan
from moejax.parallel.expert.transports import TRANSPORTS
from tests.oracle import kept_routes
from tests.oracle.capacity import capacity
from tests.parallel.ragged_model import ragged_all_to_all
from tests.parallel.routing import routing

EXPERTS, TOKENS, TOP_K, DIM, TILE = 8, 7, 2, 3, 8
RANKS = P(("dp", "ep"))


@functools.lru_cache
def layer(ep: int, capacity_factor: float | None, transport: str = "gather"):
    """A jitted layer over ep ranks whose expert e multiplies by e + 1, with its traffic and gradients of the summed output."""
    mesh = make_mesh(MeshConfig(ep=ep))

    def run(x, experts, weights, valid):
        first = jax.lax.axis_index("ep") * (EXPERTS // ep)

        def scale_rows(rows, group_sizes):
            aligned = -(-group_sizes // TILE) * TILE
            local = jnp.searchsorted(jnp.cumsum(aligned), jnp.arange(rows.shape[0]), side="right")
            return rows * (first + local + 1).astype(rows.dtype)[:, None]

        def total(x, weights):
            y, traffic = expert_parallel(
                x,
                experts,
                weights,
                valid,
                scale_rows,
                num_experts=EXPERTS,
                capacity_factor=capacity_factor,
                tile=TILE,
                transport=TRANSPORTS[transport],
            )
            return y.sum(), (y, traffic)

        (dx, dw), (y, traffic) = jax.grad(total, argnums=(0, 1), has_aux=True)(x, weights)
        return y, dx, dw, jax.tree.map(lambda a: a[None], traffic)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(RANKS,) * 4, out_specs=RANKS, check_vma=False))


@functools.lru_cache
def plan_kept(ep: int, limit: int):
    """Which routes a plan with this capacity keeps."""
    mesh = make_mesh(MeshConfig(ep=ep))

    def run(experts):
        return make_plan(experts, num_experts=EXPERTS, capacity=limit, tile=TILE, axis="ep").kept

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=RANKS, out_specs=RANKS, check_vma=False))


def routes(kind: str, ep: int, seed: int):
    return routing(kind, ep, seed, tokens=TOKENS, top_k=TOP_K)


def expected_kept(experts, real, capacity_factor):
    return kept_routes(experts, real, num_experts=EXPERTS, capacity_factor=capacity_factor)


@pytest.mark.parametrize("kind", ["even", "skewed", "padded", "one"])
@pytest.mark.parametrize("factor", [0.01, 0.5, 0.9, 1.25, 100.0])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_plan_keeps_exactly_the_routes_of_the_plain_rule(ep, factor, kind):
    kept = plan_kept(ep, capacity(factor, TOKENS, TOP_K))
    for seed in range(4):
        experts, real = routes(kind, ep, seed)
        marked = np.where(real[..., None], experts, EXPERTS)
        got = np.asarray(kept(marked.reshape(-1, TOP_K))).reshape(experts.shape)
        np.testing.assert_array_equal(got, expected_kept(experts, real, factor))


def run_and_compare(ep: int, factor: float | None, kind: str, seed: int, transport: str = "gather"):
    """Output, gradients and traffic against plain NumPy. Returns the output and the kept routes."""
    experts, real = routes(kind, ep, seed)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ep, TOKENS, DIM)).astype(np.float32)
    weights = rng.random((ep, TOKENS, TOP_K)).astype(np.float32)
    flat = [a.reshape(-1, *a.shape[2:]) for a in (x, experts, weights, real)]
    y, dx, dw, traffic = layer(ep, factor, transport)(*flat)
    kept = expected_kept(experts, real, factor)
    gain = np.where(kept, weights * (experts + 1), 0).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(y).reshape(x.shape), x * gain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(dx).reshape(x.shape), np.broadcast_to(gain, x.shape), rtol=1e-5, atol=1e-5)
    slope = np.where(kept, x.sum(axis=-1, keepdims=True) * (experts + 1), 0)
    np.testing.assert_allclose(np.asarray(dw).reshape(slope.shape), slope, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(traffic.routes, real.sum(axis=1) * TOP_K)
    np.testing.assert_array_equal(traffic.dropped, real.sum(axis=1) * TOP_K - kept.sum(axis=(1, 2)))
    return np.asarray(y).reshape(x.shape), kept


@pytest.mark.parametrize("kind", ["skewed", "padded", "one"])
@pytest.mark.parametrize("factor", [None, 0.6])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_output_and_gradients_are_the_weighted_sum_over_kept_routes(ep, factor, kind):
    for seed in range(3):
        run_and_compare(ep, factor, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 0.6])
@pytest.mark.parametrize("transport", ["dense", "ring", "ragged"])
def test_every_transport_has_the_layers_output_and_gradients(transport, factor, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    for kind in ("skewed", "padded", "one"):
        run_and_compare(4, factor, kind, 0, transport)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_p34_extreme_capacity_factors_drop_to_one_row_or_nothing_and_never_give_nan(factor):
    y, kept = run_and_compare(8, factor, "skewed", 0)
    assert np.isfinite(y).all()
    if factor == 100:
        assert kept.all()
    else:
        assert kept.sum() <= 8  # one row for each rank
        dropped = ~kept.any(axis=-1)
        assert dropped.sum() > 40
        assert not y[dropped].any()  # the residual stream passes such a token on unchanged


def test_dropless_takes_every_route_of_every_rank_to_one_expert():
    _, kept = run_and_compare(8, None, "one", 0)
    assert kept.all()


@pytest.fixture
def gpu(monkeypatch):
    """Choices made here are those for a GPU."""
    monkeypatch.setattr("moejax.parallel.expert.choice.platform", lambda: "gpu")


def test_p16_on_cpu_auto_takes_a_transport_that_runs_there():
    assert choose_transport("auto", 8).name == "gather"


def test_p16_a_transport_that_cpu_lacks_is_refused_with_the_way_out():
    for ranks in (1, 8):
        with pytest.raises(ConfigError, match=r"model\.moe\.transport=ragged needs GPUs.*use gather or auto"):
            choose_transport("ragged", ranks)


def test_on_gpus_auto_takes_ragged(gpu):
    assert choose_transport("auto", 8).name == "ragged"


@pytest.mark.parametrize("name", ["auto", "gather", "dense", "ring"])
def test_one_rank_needs_no_transport(name):
    assert choose_transport(name, 1).name == "local"


@pytest.mark.parametrize("name", ["ragged", "auto"])
def test_p19_more_than_32_ranks_with_ragged_warn_once_of_the_known_fault(gpu, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        choose_transport(name, 32)
        assert not caught
        for _ in range(3):
            assert choose_transport(name, 64).name == "ragged"
    (warning,) = caught
    assert str(warning.message) == (
        f"model.moe.transport={name} with mesh.ep=64 may fail with CUDA_ERROR_ILLEGAL_ADDRESS: XLA's one-shot kernel is known to, above "
        "32 ranks in one NVLink domain (https://github.com/openxla/xla/issues/47283); if it does, use ring or dense, or start with "
        "XLA_FLAGS=--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
    )


@pytest.mark.parametrize("name", ["gather", "dense", "ring"])
def test_p19_other_transports_do_not_warn(gpu, name, recwarn):
    assert choose_transport(name, 64).name == name
    assert not recwarn.list


def test_the_settings_transports_are_those_of_the_table():
    assert typing.get_args(typing.get_type_hints(MoEConfig)["transport"]) == ("auto", *TRANSPORTS)
