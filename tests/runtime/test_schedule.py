"""Schedules as read from HLO text: what lies beside a collective, what it waits for, and whose it is."""

import pytest

from splash_jax.runtime.schedule import read_schedule

HEADER = "HloModule jit_beside, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=4\n\n"
BODIES = """\
%fused_dot (param_0: f32[8,8], param_1: f32[8,8]) -> f32[8,8] {
  %param_0 = f32[8,8]{1,0} parameter(0)
  %param_1 = f32[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%param_0, %param_1), metadata={op_name="jit(beside)/attention/dot_general"}
}

%fused_pages (param_0.1: f32[8,8], param_1.1: s32[4]) -> f32[4,8] {
  %param_0.1 = f32[8,8]{1,0} parameter(0)
  %param_1.1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = f32[4,8]{1,0} gather(%param_0.1, %param_1.1), metadata={op_name="jit(beside)/switch.move/gather"}
}

%fused_both (param_0.2: f32[8,8], param_1.2: f32[8,8]) -> (f32[4,8], f32[8,8]) {
  %param_0.2 = f32[8,8]{1,0} parameter(0)
  %param_1.2 = f32[8,8]{1,0} parameter(1)
  %slice.1 = f32[4,8]{1,0} slice(%param_0.2), metadata={op_name="jit(beside)/switch.move/slice"}
  %add.1 = f32[8,8]{1,0} add(%param_0.2, %param_1.2), metadata={op_name="jit(beside)/attention/add"}
  ROOT %tuple.1 = (f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%slice.1, %add.1)
}

%wrapped (param_0.3: f32[4,8]) -> f32[4,8] {
  %param_0.3 = f32[4,8]{1,0} parameter(0)
  ROOT %a2a.9 = f32[4,8]{1,0} all-to-all(%param_0.3), replica_groups={{0,1,2,3}}, metadata={op_name="a/switch.move"}
}

"""
MOVE = 'metadata={op_name="jit(beside)/switch.move/all_gather"}'
GROUPS = "replica_groups={{0,1,2,3}}"
ARGUMENTS = """\
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %moved = f32[2,8]{1,0} parameter(2)
  %pool = f32[8,8]{1,0} parameter(3)
  %read = s32[4]{0} parameter(4)
"""
DOT = "  %dot = f32[8,8]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_dot\n"
START = f"  %ag = (f32[2,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%moved), {GROUPS}, dimensions={{0}}, {MOVE}\n"
DONE = f"  %agd = f32[8,8]{{1,0}} all-gather-done(%ag), {MOVE}\n"


def schedule(*lines: str):
    return read_schedule(
        HEADER + BODIES + "ENTRY %main (x: f32[8,8]) -> f32[8,8] {\n" + ARGUMENTS + "".join(lines) + "}\n"
    )


def test_compute_between_start_and_done_hides_a_transfer():
    found = schedule(START, DOT, DONE)
    (gather,) = found.collectives
    assert gather.asynchronous and gather.moves and gather.hidden
    assert gather.beside == ("dot",) and gather.needs == ()
    assert found.transfer_bytes == 192 and found.overlapped_share == 1.0
    found.check_independent()


def test_a_synchronous_collective_hides_nothing():
    line = f"  %ag = f32[8,8]{{1,0}} all-gather(%moved), {GROUPS}, dimensions={{0}}, {MOVE}\n"
    found = schedule(line, DOT)
    (gather,) = found.collectives
    assert not gather.asynchronous and not gather.hidden
    assert found.transfer_bytes == 192 and found.overlapped_share == 0.0


def test_a_start_marked_synchronous_is_synchronous():
    marked = START.rstrip() + ', backend_config={"collective_backend_config":{"is_sync":true}}\n'
    assert schedule(marked, DOT, DONE).overlapped_share == 0.0


def test_nothing_between_start_and_done_hides_nothing():
    assert schedule(DOT, START, DONE).overlapped_share == 0.0
    pages = "  %pages = f32[4,8]{1,0} fusion(%pool, %read), kind=kLoop, calls=%fused_pages\n"
    assert schedule(START, pages, DONE, DOT).overlapped_share == 0.0  # the transfer's own compute


def test_the_share_is_of_bytes():
    late = START.replace("%ag ", "%ag2 ") + DONE.replace("%agd", "%agd2").replace("(%ag)", "(%ag2)")
    small = f"  %cp = f32[8,8]{{1,0}} collective-permute(%pool), source_target_pairs={{{{0,1}}}}, {MOVE}\n"
    found = schedule(START, DOT, DONE, late, small)
    assert [c.hidden for c in found.collectives] == [True, False, False]
    assert found.overlapped_share == pytest.approx(192 / (192 + 192 + 256))


def test_a_planted_dependence_is_rejected():
    planted = START.replace("f32[2,8]{1,0}, ", "f32[8,8]{1,0}, ").replace("(%moved)", "(%part)")
    part = "  %part = f32[2,8]{1,0} bitcast(%dot)\n"
    more = "  %dot2 = f32[8,8]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_dot\n"
    found = schedule(DOT, part, planted, more, DONE)
    assert found.collectives[0].needs == ("dot",) and found.overlapped_share == 0.0
    with pytest.raises(ValueError, match=r"the transfer ag \(all-gather\) waits for dot of the layer beside it"):
        found.check_independent()


def test_a_fusion_of_both_is_a_dependence():
    both = "  %both = (f32[4,8]{1,0}, f32[8,8]{1,0}) fusion(%x, %w), kind=kLoop, calls=%fused_both\n"
    part = "  %part = f32[4,8]{1,0} get-tuple-element(%both), index=0\n"
    found = schedule(both, part, START.replace("(%moved)", "(%part)"), DOT, DONE)
    assert found.collectives[0].needs == ("both",)


def test_a_transfer_may_wait_for_its_own_page_gather():
    pages = "  %pages = f32[4,8]{1,0} fusion(%pool, %read), kind=kLoop, calls=%fused_pages\n"
    found = schedule(pages, START.replace("(%moved)", "(%pages)"), DOT, DONE)
    found.check_independent()
    assert found.overlapped_share == 1.0


@pytest.mark.parametrize(
    "start",
    [
        "  %a2a = ((f32[4,8]{1,0}), f32[4,8]{1,0}) async-start(%pool), calls=%wrapped\n",
        "  %a2a = ((f32[4,8]{1,0}), f32[4,8]{1,0}) all-to-all-start(%pool), replica_groups={{0,1,2,3}}, "
        'dimensions={0}, metadata={op_name="jit(beside)/switch.move/all_to_all"}\n',
    ],
    ids=["wrapped", "sugared"],
)
def test_an_exchange_split_in_two(start):
    done = "async-done" if "async-start" in start else "all-to-all-done"
    found = schedule(start, DOT, f"  %a2ad = f32[4,8]{{1,0}} {done}(%a2a)\n")
    (exchange,) = found.transfers
    assert exchange.collective.kind == "all-to-all" and exchange.hidden and found.transfer_bytes == 96


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_a_fused_collective_is_a_collective_and_no_compute(split):
    lines = ["  %sum = f32[4,8]{1,0} fusion(%pool), kind=kCustom, calls=%wrapped\n"]
    if split:
        lines = ["  %s = ((f32[4,8]{1,0}), f32[4,8]{1,0}) fusion-start(%pool), kind=kCustom, calls=%wrapped\n"]
        lines += [DOT, "  %sd = f32[4,8]{1,0} fusion-done(%s)\n"]
    found = schedule(START, *lines, DONE)
    assert [c.collective.kind for c in found.collectives] == ["all-gather", "all-to-all"]
    assert [c.hidden for c in found.collectives] == [split, split]
    assert "sum" not in found.collectives[0].beside


def test_a_layers_own_exchange_is_no_transfer():
    own = f'  %ar = f32[8,8]{{1,0}} all-reduce(%dot), {GROUPS}, metadata={{op_name="jit(beside)/attention/psum"}}\n'
    found = schedule(DOT, own)
    assert not found.transfers and found.overlapped_share is None and not found.collectives[0].moves


def test_what_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match="is not scheduled: read it from a compiled program"):
        read_schedule("HloModule jit_f\nENTRY %main () -> f32[] {\n}\n")
    with pytest.raises(ValueError, match="no ENTRY"):
        read_schedule(HEADER)
    with pytest.raises(ValueError, match="no line after ag ends what it starts"):
        schedule(START, DOT)
