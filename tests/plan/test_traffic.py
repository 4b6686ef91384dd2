# ruff: noqa: E501  HLO has long lines
"""Collectives, host transfers and kernels, read from HLO that was cut down to what matters."""

import pytest

from moejax.plan.hlo import Hlo
from moejax.plan.traffic import Collective, collectives, host_transfers, table

MESH = {"pp": 1, "dp": 2, "ep": 4}
TEXT = """HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused (p: bf16[64,8]) -> bf16[64,8] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %call = bf16[64,8]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2", backend_config={"name":"grouped_forward_sm90"}
}

%layer (state: (s32[], bf16[32,8])) -> (s32[], bf16[32,8]) {
  %state = (s32[], bf16[32,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[32,8]{1,0} get-tuple-element(%state), index=1
  %empty = bf16[64,8]{1,0} broadcast(%zero), dimensions={}
  %counts = s32[4,16]{1,0} all-gather(%mine), replica_groups=mesh['pp'=1,'dp'=2,'ep'=4] {'ep'}, dimensions={0}, metadata={op_name="jit(step)/plan"}
  %go = ((bf16[32,8]{1,0}, bf16[64,8]{1,0:S(7)}, s64[16]{0}), bf16[64,8]{1,0:S(7)}) ragged-all-to-all-start(%x, %empty, %o), replica_groups={{0,1,2,3},{4,5,6,7}}
  %work = bf16[64,8]{1,0} fusion(%y), kind=kCustom, calls=%fused, metadata={op_name="jit(step)/experts"}
  %view = bf16[8,64]{0,1} bitcast(%work)
  %came = bf16[64,8]{1,0} ragged-all-to-all-done(%go)
  %back = bf16[32,8]{1,0} ragged-all-to-all(%came, %zeros, %o), replica_groups=[2,4]<=[8]
  ROOT %next = (s32[], bf16[32,8]{1,0}) tuple(%i, %back)
}

%test (state: (s32[], bf16[32,8])) -> pred[] {
  %state.1 = (s32[], bf16[32,8]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%n, %m), direction=LT
}

ENTRY %main (arg: bf16[32,8]) -> f32[16] {
  %arg = bf16[32,8]{1,0} parameter(0)
  %loop = (s32[], bf16[32,8]{1,0}) while(%start), condition=%test, body=%layer, backend_config={"known_trip_count":{"n":"6"}}
  %scattered = (f32[4]{0}, f32[2,3]{1,0}) reduce-scatter(%g, %h), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%sum
  %gather = ((bf16[4]{0}, f32[2]{0}), (bf16[32]{0}, f32[16]{0})) all-gather-start(%u, %v), replica_groups=[1,8]<=[8], dimensions={0}
  %end = (bf16[32]{0}, f32[16]{0}) all-gather-done(%gather)
  %sent = (f32[16]{0:S(5)}, f32[16]{0}, u32[]) copy-start(%act)
  ROOT %total = f32[16]{0} all-reduce(%norms), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%sum
}
"""


def test_every_collective_with_its_axes_bytes_runs_and_overlap():
    by_kind = {(c.kind, c.times): c for c in collectives(Hlo(TEXT), MESH)}
    assert by_kind == {
        ("all-gather", 6): Collective("all-gather", ("ep",), ("s32[4,16]",), (256,), 6, None, "jit(step)/plan"),
        ("ragged-all-to-all", 6): Collective("ragged-all-to-all", ("ep",), ("bf16[32,8]",), (512,), 6, None, ""),
        ("reduce-scatter", 1): Collective("reduce-scatter", ("dp",), ("f32[4]", "f32[2,3]"), (32, 48), 1, None, ""),
        ("all-gather", 1): Collective("all-gather", ("dp", "ep"), ("bf16[32]", "f32[16]"), (64, 64), 1, 0, ""),
        ("all-reduce", 1): Collective("all-reduce", ("dp",), ("f32[16]",), (64,), 1, None, ""),
    }
    moves = [c for c in collectives(Hlo(TEXT), MESH) if c.kind == "ragged-all-to-all"]
    assert [(c.payload, c.times, c.overlap) for c in moves] == [(512, 6, 1), (512, 6, None)]


def test_payload_by_dtype():
    (both,) = (c for c in collectives(Hlo(TEXT), MESH) if c.overlap == 0)
    assert (both.dtypes, both.payload, both.payload_of("bf16"), both.payload_of("s32")) == (("bf16", "f32"), 128, 64, 0)


def test_the_table_joins_equal_lines_and_puts_most_bytes_first():
    lines = table(collectives(Hlo(TEXT), MESH)).splitlines()
    assert lines[0].split() == ["collective", "axes", "static", "runs", "MiB", "each", "overlap", "result"]
    assert [line.split()[:4] for line in lines[1:3]] == [["ragged-all-to-all", "ep", "1", "6"]] * 2
    assert len(lines) == 7


def test_kernels_are_counted_inside_fusions_and_loops():
    assert Hlo(TEXT).kernels() == {"grouped_forward_sm90": 6}


def test_what_crosses_of_an_array_of_all_layers_is_one_layers_part():
    line = "%put = ((f32[9,16]{1,0:S(5)}, f32[1,16]{1,0}, s32[]), f32[9,16]{1,0:S(5)}, u32[]) fusion-start(%all, %part, %i), kind=kLoop"
    hlo = Hlo(TEXT.replace("  %view = ", f"  {line}\n  %view = "))
    assert [(transfer.size_bytes, transfer.times) for transfer in host_transfers(hlo)] == [(64, 1), (64, 6)]


def test_copies_to_host_memory_and_callbacks_are_found():
    (sent,) = host_transfers(Hlo(TEXT))
    assert (sent.size_bytes, sent.times) == (64, 1)
    call = '  %cb = f32[2]{0} custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"\n  %out = token[] outfeed(%x, %t)\n'
    found = host_transfers(Hlo(TEXT.replace("  %sent = ", call + "  %sent = ")))
    assert [transfer.what.split()[0] for transfer in found] == ["custom-call", "outfeed", "copy-start"]


@pytest.mark.parametrize(
    "line",
    [
        "%c = f32[] conditional(%p, %x, %y), branch_computations={%layer, %test}",
        "%c = f32[] conditional(%p, %x, %y), true_computation=%layer, false_computation=%test",
    ],
)
def test_conditionals_are_found_and_their_branches_read(line):
    hlo = Hlo(TEXT.replace("  %end = ", f"  {line}\n  %end = "))
    assert hlo.conditionals() == ["c"]
    assert hlo.times["layer"] == 7
    assert Hlo(TEXT).conditionals() == []


def test_groups_that_are_no_axes_are_an_error():
    with pytest.raises(ValueError, match="no axes of the mesh"):
        collectives(Hlo(TEXT.replace("{{0,4},{1,5},{2,6},{3,7}}", "{{0,5},{1,4},{2,7},{3,6}}")), MESH)


def test_a_permutation_spans_the_axis_that_it_leads_around():
    ring = "collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    text = TEXT.replace("  %end = ", f"  %p = f32[8]{{0}} {ring}\n  %end = ")
    (permute,) = (c for c in collectives(Hlo(text), MESH) if c.kind == "collective-permute")
    assert (permute.axes, permute.payload) == (("ep",), 32)
