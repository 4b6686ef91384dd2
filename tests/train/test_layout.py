"""Meshes, and the one rule that places parameters and their state, by examples worked out by hand."""

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel import AXES, DATA_AXES, make_mesh
from moejax.parallel.rules import Rule, make_rule

EXPERT = ("layer", "expert", "embed", "mlp")
BOTH = ("dp", "ep")
KIB_64 = 64 * 1024 // 4
"""Elements of 64 KiB in float32."""

# Name: shape, logical axes, (dp, ep), whether the optimizer is elementwise, and the rule.
CASES = {
    "one device replicates over nothing": ((512, 512), ("vocab", "embed"), (1, 1), True, Rule((), None, P(None, None), P(None, None), 1)),
    "dense: over both axes, first dim that divides": (
        (512, 512),
        ("vocab", "embed"),
        (2, 4),
        True,
        Rule(BOTH, 0, P(None, None), P(BOTH, None), 1),
    ),
    "dense: the second dim when the first does not divide": (
        (516, 512),
        ("vocab", "embed"),
        (2, 4),
        True,
        Rule(BOTH, 1, P(None, None), P(None, BOTH), 1),
    ),
    "dense: no dim divides": ((517, 515), ("vocab", "embed"), (2, 4), True, Rule(BOTH, None, P(None, None), P(None, None), 8)),
    "axes of size 1 are left out, ep": ((512, 512), ("vocab", "embed"), (4, 1), True, Rule(("dp",), 0, P(None, None), P("dp", None), 1)),
    "axes of size 1 are left out, dp": ((512, 512), ("vocab", "embed"), (1, 4), True, Rule(("ep",), 0, P(None, None), P("ep", None), 1)),
    "a stack dim comes first": (
        (512, 512, 8),
        ("embed", "mlp", "layer"),
        (2, 4),
        True,
        Rule(BOTH, 2, P(None, None, None), P(None, None, BOTH), 1),
    ),
    "64 KiB is large": ((KIB_64,), ("embed",), (2, 1), True, Rule(("dp",), 0, P(None), P("dp"), 1)),
    "below 64 KiB is small": ((KIB_64 - 2,), ("embed",), (2, 1), True, Rule(("dp",), None, P(None), P(None), 2)),
    "experts: over dp, by layer": (
        (2, 8, 128, 128),
        EXPERT,
        (2, 4),
        True,
        Rule(("dp",), 0, P(None, "ep", None, None), P("dp", "ep", None, None), 1),
    ),
    "experts: over dp, by expert inside the rank's block": (
        (3, 8, 128, 128),
        EXPERT,
        (2, 4),
        True,
        Rule(("dp",), 1, P(None, "ep", None, None), P(None, ("ep", "dp"), None, None), 1),
    ),
    "experts: one per rank, so by another dim": (
        (3, 4, 128, 128),
        EXPERT,
        (2, 4),
        True,
        Rule(("dp",), 2, P(None, "ep", None, None), P(None, "ep", "dp", None), 1),
    ),
    "experts: another dim needs an elementwise optimizer": (
        (3, 4, 128, 128),
        EXPERT,
        (2, 4),
        False,
        Rule(("dp",), None, P(None, "ep", None, None), P(None, "ep", None, None), 2),
    ),
    "experts: a stack dim does not": (
        (2, 4, 128, 128),
        EXPERT,
        (2, 4),
        False,
        Rule(("dp",), 0, P(None, "ep", None, None), P("dp", "ep", None, None), 1),
    ),
    "experts: without dp nothing is left to shard": (
        (2, 8, 128, 128),
        EXPERT,
        (1, 8),
        True,
        Rule((), None, P(None, "ep", None, None), P(None, "ep", None, None), 1),
    ),
    "experts: smallness is that of the rank's block": (
        (2, 8, 32, 64),
        EXPERT,
        (2, 4),
        True,
        Rule(("dp",), None, P(None, "ep", None, None), P(None, "ep", None, None), 2),
    ),
    "experts: with ep=1 they are still named": (
        (2, 8, 128, 128),
        EXPERT,
        (2, 1),
        True,
        Rule(("dp",), 0, P(None, "ep", None, None), P("dp", "ep", None, None), 1),
    ),
}


@pytest.mark.parametrize(("shape", "axes", "mesh", "elementwise", "expected"), CASES.values(), ids=CASES.keys())
def test_the_rule_of_a_leaf(shape, axes, mesh, elementwise, expected):
    assert make_rule(shape, axes, {"pp": 1, "dp": mesh[0], "ep": mesh[1]}, elementwise=elementwise) == expected


FSDP = {
    "dense weights are kept as their state is, never split by layer": ((8, 512, 512), ("layer", "embed", "mlp"), P(None, BOTH, None)),
    "experts are split further over dp": ((8, 8, 128, 512), EXPERT, P(None, ("ep", "dp"), None, None)),
    "an expert count that does not divide leaves the next dim": ((8, 4, 128, 512), EXPERT, P(None, "ep", "dp", None)),
    "no dim but the layers divides: replicated": ((8, 515, 517), ("layer", "embed", "mlp"), P(None, None, None)),
    "small leaves stay whole": ((8, 16), ("layer", "norm"), P(None, None)),
}


@pytest.mark.parametrize(("shape", "axes", "kept"), FSDP.values(), ids=FSDP.keys())
def test_fsdp_keeps_parameters_as_shards(shape, axes, kept):
    rule = make_rule(shape, axes, {"pp": 1, "dp": 2, "ep": 4}, weights="fsdp")
    assert rule.param == rule.state == kept
    assert rule.is_gathered == (rule.dim is not None)


def test_a_mesh_takes_the_first_devices_with_ep_innermost():
    mesh = make_mesh(MeshConfig(dp=2, ep=3))
    assert mesh.axis_names == AXES == ("pp", "dp", "ep")
    assert dict(mesh.shape) == {"pp": 1, "dp": 2, "ep": 3}
    assert DATA_AXES == ("dp", "ep")
    assert [device.id for device in mesh.devices[0].ravel()] == [0, 1, 2, 3, 4, 5]


def test_a_mesh_can_be_built_over_given_devices():
    chosen = jax.devices()[4:]
    assert list(make_mesh(MeshConfig(ep=2), chosen).devices.ravel()) == chosen[:2]


def test_a_mesh_larger_than_the_machine_is_refused():
    message = "mesh.dp=3 x mesh.ep=4 needs 12 devices, but there are 8 (cpu); use a smaller mesh, or start with more devices"
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_mesh(MeshConfig(dp=3, ep=4))
