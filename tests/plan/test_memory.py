"""The largest buffers at the peak, read from dumps that were cut down to what matters."""

from moejax.plan.hlo import Hlo
from moejax.plan.memory import Buffer, peak_buffers

HLO = """HloModule jit_step, is_scheduled=true

%inner (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %sum = f32[8,4]{1,0} add(%p, %p), metadata={op_name="jit(step)/grads/add"}
}

%body (state: (s32[], f32[8,4], bf16[2,4])) -> (s32[], f32[8,4], bf16[2,4]) {
  %state = (s32[], f32[8,4]{1,0}, bf16[2,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %new = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%inner
  %saved = bf16[2,4]{1,0} dynamic-update-slice(%y, %z, %i), metadata={op_name="jit(step)/block/dus"}
  %scratch = f32[16]{0} sort(%k), metadata={op_name="jit(step)/plan/sort"}
  ROOT %next = (s32[], f32[8,4]{1,0}, bf16[2,4]{1,0}) tuple(%i, %new, %saved)
}

%test (state.1: (s32[], f32[8,4], bf16[2,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, bf16[2,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%n, %m), direction=LT
}

ENTRY %main (arg: f32[100]) -> f32[8,4] {
  %arg = f32[100]{0} parameter(0)
  ROOT %loop = (s32[], f32[8,4]{1,0}, bf16[2,4]{1,0}) while(%start), condition=%test, body=%body
}
"""
LIVE = """HloLiveRange (max 9):
  BufferLiveRange:
    arg{}:0-9
    before{}:0-3
    loop{1}:1-9
    new{}:6-8
    scratch{}:5-7
    small{}:8-9
    state{2}:4-9
  Live ranges at 7 (peak):
    arg{}: 400 bytes (cumulative: 400 bytes)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, page 0, parameter 0, shape |f32[100]| at ShapeIndex {}:
 value: <1 arg @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 256, page 0, preallocated-temp:
 value: <2 loop{1} (phi) @0> (size=128,offset=0): f32[8,4]{1,0}
 value: <3 new @0> (size=128,offset=0): f32[8,4]{1,0}
 value: <4 scratch @0> (size=64,offset=128): f32[16]{0}
 value: <5 state{2} (phi) @0> (size=16,offset=192): bf16[2,4]{1,0}
 value: <6 before @0> (size=70,offset=128): u8[70]{0}
 value: <7 small @0> (size=60,offset=128): u8[60]{0}
"""


def test_each_place_counts_once_and_says_where_it_comes_from():
    """Most is alive from 5 to 7: 128 bytes of sums, 64 of the sort, 16 kept. Earlier and later the sort's place holds other things."""
    assert peak_buffers(LIVE, ASSIGNMENT, Hlo(HLO)) == [
        Buffer("loop{1}", 128, "f32[8,4]", "jit(step)/grads/add"),
        Buffer("scratch", 64, "f32[16]", "jit(step)/plan/sort"),
        Buffer("state{2}", 16, "bf16[2,4]", "jit(step)/block/dus"),
    ]


def test_what_an_asynchronous_instruction_wraps_comes_from_what_it_sends():
    """HLO text shows the start and not what is inside; the order of instructions has both, one after the other."""
    hlo = Hlo("""HloModule jit_step, is_scheduled=true

ENTRY %main (arg: f32[100]) -> f32[8,4] {
  %rows = f32[8,4]{1,0} fusion(%arg), kind=kLoop, metadata={op_name="jit(step)/dispatch/gather"}
  %move-start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%rows), replica_groups={{0,1}}
  ROOT %move-done = f32[8,4]{1,0} all-to-all-done(%move-start)
}
""")
    live = "HloLiveRange (max 3):\n  InstructionSequence:\n    0:rows\n    1:move.7\n    2:move-start\n    3:move-done\n"
    live += "  BufferLiveRange:\n    move.7{}:2-3\n"
    assignment = "allocation 1: size 128, page 0, preallocated-temp:\n value: <1 move.7 @7> (size=128,offset=0): f32[8,4]{1,0}\n"
    assert peak_buffers(live, assignment, hlo) == [Buffer("move.7", 128, "f32[8,4]", "jit(step)/dispatch/gather")]


def test_a_program_without_temporaries_has_none():
    assert peak_buffers("HloLiveRange (max 1):\n  BufferLiveRange:\n    arg{}:0-1\n", ASSIGNMENT, Hlo(HLO)) == []
