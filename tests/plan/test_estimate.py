"""The arithmetic behind a plan: pipeline ranks, microbatches under way, wrong numbers of GPUs, refused kernels."""

import dataclasses
import math

import pytest

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel.pipeline import build
from moejax.plan.activations import kept_bytes, offloaded_bytes, temp_bytes, waiting_bytes
from moejax.plan.estimate import check_count, estimate, memory_bytes
from moejax.plan.formula import local_parameters, rank_layers
from moejax.plan.moves import dispatch_buffer_bytes, transport_of
from moejax.plan.payloads import step_traffic
from moejax.plan.stages import stages_of
from moejax.train.flops import count_parameters
from tests.plan.programs import eight_layers

MIB = 2**20


def piped(pp: int, virtual: int = 1, microbatches: int = 16, **model):
    config = eight_layers(dp=1, ep=8, num_experts=64, microbatches=microbatches, **model)
    return dataclasses.replace(config, mesh=MeshConfig(pp=pp, virtual_stages=virtual, ep=8))


@pytest.mark.parametrize(("pp", "virtual", "layers"), [(1, 1, 7), (2, 1, 4), (7, 1, 1), (3, 2, 4), (2, 3, 6)])
def test_stages_have_equally_many_blocks_and_hold_the_whole_model(pp, virtual, layers):
    config = piped(pp, virtual)
    assert rank_layers(config) == layers
    blocks = sum(count for name, count, _ in local_parameters(config) if name.startswith("moe_blocks"))
    ends = sum(count for name, count, _ in local_parameters(config) if not name.startswith("moe_blocks"))
    whole = piped(1)
    all_blocks = sum(count for name, count, _ in local_parameters(whole) if name.startswith("moe_blocks"))
    assert blocks * 7 == all_blocks * layers
    assert ends + all_blocks == sum(count for _, count, _ in local_parameters(whole))


def test_the_ranks_of_a_mesh_hold_every_parameter_once():
    """Counted over ep, where experts are split, the local parameters are those of the model."""
    config = eight_layers(dp=1, ep=8, num_experts=64)
    experts = sum(count for name, count, _ in local_parameters(config) if ".experts." in name)
    others = sum(count for name, count, _ in local_parameters(config) if ".experts." not in name)
    assert 8 * experts + others == count_parameters(config.model)[0]


@pytest.mark.parametrize(
    ("pp", "virtual", "microbatches", "under_way", "waste"), [(4, 1, 16, 7, 0), (4, 1, 2, 2, 1), (2, 2, 16, 5, 0), (2, 3, 1, 3, 1)]
)
def test_p42_what_waits_is_bounded_by_the_stages_not_the_microbatches(pp, virtual, microbatches, under_way, waste):
    config, x = piped(pp, virtual, microbatches), 8192 * 4096 * 2
    table = build(config.mesh.schedule_name, pp, microbatches, virtual)
    assert table.num_residuals == under_way
    assert stages_of(config).kept == under_way + waste
    rings = 2 * -(-microbatches // pp) + 2
    assert waiting_bytes(config) == {"between stages": x * (table.num_inputs + table.num_gradients + 4 + rings)}
    assert temp_bytes(config)["kept activations"] == kept_bytes(config) * (under_way + waste)
    if microbatches == 16:
        more, less = stages_of(piped(pp, virtual, 64)), stages_of(config)
        assert (more.inputs, more.gradients, more.kept) == (less.inputs, less.gradients, less.kept)
    everything = dataclasses.replace(piped(4), mesh=MeshConfig(pp=4, ep=8, schedule="gpipe"))
    assert stages_of(everything).kept == 16 + 1
    assert waiting_bytes(piped(1)) == {}


def test_what_waits_is_what_the_table_of_the_schedule_says():
    for schedule, virtual in (("v_shaped", 2), ("zero_bubble", 1), ("zero_bubble", 2)):
        table = build(schedule, 3, 12, virtual)
        stages = stages_of(
            dataclasses.replace(
                piped(1), microbatches=12, batch_size=96, mesh=MeshConfig(pp=3, virtual_stages=virtual, ep=8, schedule=schedule)
            )
        )
        assert stages.kept in (table.num_residuals, table.num_residuals + 1)
        assert (stages.inputs, stages.gradients) == (table.num_inputs + 2, table.num_gradients + 2)
        assert stages.bubble == table.bubble()
        assert stages.neighbours == (2 if schedule == "v_shaped" else 1)
    assert build("zero_bubble", 3, 12).num_gradients > build("1f1b", 3, 12).num_gradients, "they wait for the pass of the weights"


@pytest.mark.parametrize(("pp", "virtual", "microbatches"), [(2, 1, 4), (7, 1, 5), (2, 2, 4), (2, 2, 5)])
def test_a_pipeline_sends_in_every_tick(pp, virtual, microbatches):
    config = piped(pp, virtual, microbatches)
    schedule = build(config.mesh.schedule_name, pp, microbatches, virtual)
    forward, backward = (int((schedule.grid(kind)[:, :, 0] >= 0).any(axis=1).sum()) for kind in "FB")
    if virtual == 1 or microbatches % pp == 0:
        assert forward == backward == virtual * microbatches + pp - 1
    found = {(line.kind, line.axes): line for line in step_traffic(config)}
    x, padded = 8192 * 4096 * 2, -(-8192 // pp) * pp * 4096 * 2
    assert found["collective-permute", ("pp",)].payload == x * (2 * (forward + backward) + (microbatches % pp > 0))
    assert found["reduce-scatter", ("pp",)].payload == found["all-gather", ("pp",)].payload == padded * microbatches
    rows = found["ragged-all-to-all", ("ep",)]
    assert rows.times == 2 * (forward + backward) * rank_layers(config) // virtual


def test_the_bubble_is_that_of_the_schedules_table():
    config = piped(4, 1, 12)
    figures = estimate(config, "b300")
    assert figures.bubble == pytest.approx(3 / 15)
    assert estimate(piped(2, 2, 1), "b300").bubble == build("interleaved", 2, 1, 2).bubble() == pytest.approx(1 / 2)
    assert estimate(piped(1), "b300").bubble == 0
    assert figures.pending == {}


def test_p23_the_dispatch_buffer_is_the_rows_and_room_for_tiles():
    config = eight_layers(dp=1, ep=8, num_experts=64)
    rows = 8192 * 4 * 1.25 + 8 * 127
    assert dispatch_buffer_bytes(config) == math.ceil(rows / 128) * 128 * 4096 * 2
    assert estimate(config, "b300").dispatch_bytes == dispatch_buffer_bytes(config)


def test_a_smaller_microbatch_and_recompute_need_less_memory():
    config = eight_layers(dp=1, ep=8, num_experts=64, microbatches=2)
    smaller = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=4096))
    block = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute="block"))
    assert sum(temp_bytes(smaller).values()) < sum(temp_bytes(config).values())
    assert sum(temp_bytes(block).values()) < sum(temp_bytes(config).values())
    assert memory_bytes(config)["parameters"] == memory_bytes(smaller)["parameters"]


def test_what_is_offloaded_waits_in_host_memory():
    config = eight_layers(dp=1, ep=8, num_experts=64, recompute="offload")
    assert offloaded_bytes(config) == 8 * 64 * MIB  # the input of each block
    keep = dataclasses.replace(config.model, recompute_keep=("expert_out", "mlp_gate_up"))
    assert offloaded_bytes(dataclasses.replace(config, model=keep)) == 7 * 256 * MIB + 8192 * 2 * 20_480 * 2
    assert offloaded_bytes(eight_layers(dp=1, ep=8, num_experts=64)) == 0


@pytest.mark.parametrize(
    ("num_gpus", "words"),
    [
        (16, "num_gpus=16 is not mesh.dp=1 x mesh.ep=8 = 8; add --mesh.dp 2"),
        (12, "has to be a multiple of 8, times --mesh.dp, or --mesh.dp 3 --mesh.ep 4$"),
        (4, "has to be a multiple of 8, times --mesh.dp, or --mesh.dp 1 --mesh.ep 4$"),
        (9, "has to be a multiple of 8, times --mesh.dp$"),
        (32, "add --mesh.dp 4 and --microbatches 1, or a batch that splits evenly, such as --batch-size 64$"),
        (24, "add --mesh.dp 3 and a batch that splits evenly, such as --batch-size 48"),
    ],
)
def test_another_number_of_gpus_is_refused_with_the_way_out(num_gpus, words):
    config = dataclasses.replace(eight_layers(dp=1, ep=8, num_experts=64), batch_size=32)
    with pytest.raises(ConfigError, match=words):
        check_count(config, num_gpus)
    check_count(config, 8)


def test_a_config_that_the_gpu_cannot_take_is_refused():
    config = eight_layers(dp=1, ep=8, num_experts=64)
    with pytest.raises(ConfigError, match=r"gpu=h300 is not in the table"):
        estimate(config, "h300")
    floats = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    with pytest.raises(ConfigError, match=r"model.dtype=float32.*use dtype bfloat16"):
        estimate(floats, "h200")


def test_kernels_are_chosen_for_the_gpu_that_is_planned():
    chosen = estimate(eight_layers(dp=1, ep=8, num_experts=64), "b200").choices
    assert chosen["model.moe.grouped_matmul"].startswith("mosaic, because 'NVIDIA B200'")
    assert chosen["model.attention.implementation"].startswith("cudnn, because it runs on 'NVIDIA B200'")
    assert chosen["model.moe.transport"] == "ragged, chosen by auto for 8 ranks of b200"
    assert transport_of(eight_layers(dp=1, ep=8, num_experts=64)) == "ragged"
    wide = estimate(eight_layers(dp=1, ep=64, num_experts=64), "b200").choices
    assert "mesh.ep=64" in wide["warning 1"]
