"""What a step sends by arithmetic, against the collectives of the step compiled for eight CPU devices."""

import dataclasses
from collections import Counter

import pytest

from moejax.parallel import make_mesh
from moejax.plan.hlo import Hlo
from moejax.plan.moves import route_bytes
from moejax.plan.payloads import step_traffic
from moejax.plan.traffic import collectives
from moejax.train.state import abstract_state
from moejax.train.step import abstract_batch, make_train_step
from tests.oracle.compare import sharding_small_leaves
from tests.oracle.examples import model_config, train_config

EXPERTS = {"num_shared_experts": 1, "shared_expert_dim": 8, "capacity_factor": 1.25}
MODEL = model_config(num_layers=3, num_dense_layers=1, mlp_dim=20, moe=EXPERTS)


def run_of(**changes):
    """Changes are those of the MoE part, then of the model."""
    moe = {name: changes.pop(name) for name in ("transport", "capacity_factor") if name in changes}
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, **moe), **changes)
    return train_config(model, dp=2, ep=4, microbatches=2)


def assert_the_step_sends_what_is_counted(config):
    """CPUs send as GPUs do but for ragged, which they have not; they need no rows to fill tiles."""
    mesh = make_mesh(config.mesh)
    with sharding_small_leaves():
        compiled = make_train_step(config, mesh).lower(abstract_state(config, mesh), abstract_batch(config, mesh)).compile()
        expected = {line[:3]: line.payload for line in step_traffic(config, tile=1)}
    found: Counter = Counter()
    for c in collectives(Hlo(compiled.as_text()), dict(mesh.shape)):
        for dtype in c.dtypes:
            found[c.kind, c.axes, dtype] += c.payload_of(dtype) * c.times
    assert found.pop(("all-reduce", ("dp", "ep"), "f32")) < 1024  # metrics and norms
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "gather"},
        {"transport": "gather", "recompute": "block", "capacity_factor": None},
        {"transport": "dense", "recompute": "selective"},
        {"transport": "dense", "recompute": "block", "capacity_factor": None},
        {"transport": "ring", "recompute": "selective"},
        {"transport": "ring", "recompute": "block", "norm_placement": "post"},  # the norm behind the experts wants the sums again
        {"transport": "ring", "capacity_factor": None},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_transport_sends_what_is_counted(changes):
    assert_the_step_sends_what_is_counted(run_of(**changes))


def test_rows_of_a_rank_go_through_in_chunks_if_none_may_be_dropped():
    assert route_bytes(run_of()) == 16 // 2 // 8 * 5 * 2 * 16 * 4
    whole = run_of(capacity_factor=None)  # 5 tokens in chunks of 2, the last one filled up
    assert route_bytes(whole) == 4 * 2 * 2 * 16 * 4
    (rows,) = (line for line in step_traffic(whole) if line.kind == "ragged-all-to-all")
    assert (rows.times, rows.payload) == (2 * 2 * 4 * 4, 2 * 2 * 4 * route_bytes(whole))


def test_another_transport_is_other_traffic():
    sent = {name: sum(line.payload for line in step_traffic(run_of(transport=name))) for name in ("ragged", "gather", "dense", "ring")}
    assert sent["ragged"] < min(sent["gather"], sent["dense"], sent["ring"])
    assert len(set(sent.values())) == 4


MOVES = {"none": 4, "block": 6, "selective": 4, "offload": 6}


@pytest.mark.parametrize("mode", MOVES)
def test_rows_travel_for_every_layer_and_microbatch(mode):
    config = run_of(recompute=mode)
    (rows,) = (line for line in step_traffic(config) if line.kind == "ragged-all-to-all")
    assert (rows.axes, rows.dtype, rows.times) == (("ep",), "f32", 2 * 2 * MOVES[mode])
    assert rows.payload == rows.times * route_bytes(config)


def test_weights_travel_once_a_step_or_with_fsdp_in_every_microbatch():
    resident = train_config(MODEL, dp=2, ep=4, microbatches=2)
    fsdp = dataclasses.replace(resident, mesh=dataclasses.replace(resident.mesh, weights="fsdp"))
    with sharding_small_leaves():
        once, often = ({line[:3]: line for line in step_traffic(config) if line.dtype == "f32"} for config in (resident, fsdp))
    experts = 2 * 8 // 4 * (16 * 2 * 12 + 12 * 16)
    assert once["reduce-scatter", ("dp",), "f32"].payload == once["all-gather", ("dp",), "f32"].payload == 4 * experts
    assert often["reduce-scatter", ("dp",), "f32"].payload == 2 * 4 * experts
    assert often["all-gather", ("dp",), "f32"].payload == 2 * 2 * 4 * experts
