"""Bytes by link, counted by hand."""

import dataclasses

import pytest

from moejax.config import MeshConfig
from moejax.plan.gpus import find_gpu
from moejax.plan.links import LinkBytes, _sent, link_bytes
from moejax.plan.payloads import Traffic
from tests.plan.programs import eight_layers

ROWS, SCATTER, GATHER, HAND_ON = "ragged-all-to-all", "reduce-scatter", "all-gather", "collective-permute"


@pytest.mark.parametrize(
    ("kind", "axes", "mesh", "nvlink", "network", "crossing"),
    [
        (ROWS, ("ep",), {"ep": 8}, 700, 0, 0),  # one host: all but a rank's own eighth
        (ROWS, ("ep",), {"ep": 32}, 175, 600, 32),  # 7 of 32 on the host, 24 elsewhere
        (ROWS, ("ep",), {"dp": 4, "ep": 4}, 600, 0, 0),  # two groups of four on each host
        (SCATTER, ("ep",), {"ep": 8}, 700, 0, 0),
        (SCATTER, ("dp",), {"dp": 4, "ep": 8}, 0, 600, 32),  # one GPU of each host: nothing on NVLink
        (GATHER, ("dp", "ep"), {"dp": 2, "ep": 8}, 750, 93, 16),  # a ring of 16 over two hosts; eight GPUs share what crosses
        (GATHER, ("pp", "dp", "ep"), {"pp": 2, "dp": 2, "ep": 4}, 750, 93, 16),
        (HAND_ON, ("pp",), {"pp": 2, "dp": 1, "ep": 8}, 0, 800, 16),
        (HAND_ON, ("pp",), {"pp": 2, "dp": 1, "ep": 4}, 800, 0, 0),
        (HAND_ON, ("pp",), {"pp": 4, "dp": 1, "ep": 4}, 800, 800, 8),  # from rank 1 to 2 and from 3 to 0 between hosts, else inside
        (
            ROWS,
            ("ep",),
            {"ep": 12},
            466,
            533,
            12,
        ),  # eight GPUs on one host and four on the other: most on NVLink there, on the network here
        (GATHER, ("ep",), {"ep": 12}, 733, 183, 12),
        (ROWS, ("ep",), {"dp": 3, "ep": 4}, 600, 0, 0),  # the last host half filled
        (ROWS, ("ep",), {"dp": 2, "ep": 6}, 666, 533, 6),  # the second group has two GPUs on the first host
        ("all-reduce", ("ep",), {"ep": 8}, 1400, 0, 0),
        ("all-to-all", ("ep",), {"ep": 8}, 700, 0, 0),
    ],
)
def test_each_kind_of_collective_on_each_kind_of_group(kind, axes, mesh, nvlink, network, crossing):
    line = Traffic(kind, axes, "bf16", 800, 1)
    assert _sent(line, MeshConfig(**mesh), 8) == LinkBytes(line, nvlink, network, crossing)


def test_a_rack_is_one_domain():
    line = Traffic(ROWS, ("ep",), "bf16", 640, 1)
    assert _sent(line, MeshConfig(ep=64), find_gpu("gb200").domain) == LinkBytes(line, 630, 0, 0)


def test_links_work_at_the_same_time():
    gpu = find_gpu("h200")
    line = Traffic(ROWS, ("ep",), "bf16", 0, 1)
    assert LinkBytes(line, int(450e9), int(25e9), 8).seconds(gpu) == 1.0
    assert LinkBytes(line, int(45e9), int(50e9), 8).seconds(gpu) == 1.0


def test_every_line_of_traffic_gets_its_links():
    config = eight_layers(dp=2, ep=8, num_experts=64)
    lines = link_bytes(config, find_gpu("b300"))
    assert {line.line.kind for line in lines} == {ROWS, SCATTER, GATHER}
    assert all((line.network > 0) == ("dp" in line.line.axes) for line in lines)
    alone = dataclasses.replace(config, mesh=MeshConfig(), batch_size=2)
    assert link_bytes(alone, find_gpu("b300")) == []
