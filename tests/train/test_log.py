"""Records and figures of speed, with a clock that the test turns."""

import io

import numpy as np
import pytest
from rich.console import Console

from moejax.train.console import Screen
from moejax.train.log import Log
from moejax.train.metrics import Reading


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.records, self.logged = [], []

    def write(self, record, *, is_logged):
        self.records.append(record)
        self.logged.append(is_logged)

    def close(self):
        self.records.append("closed")


def _log(clock: Clock, sink: Memory, **changes) -> Log:
    settings: dict = {"first": 6, "total": 20, "every": 5, "tokens_per_step": 1000}
    settings |= {"tokens_seen": 5000, "flops_per_token": 1e6, "peak_flops": 1e10}
    return Log(Screen(Console(file=io.StringIO())), [sink], clock=clock, **(settings | changes))


def _reading(step: int, skipped: float = 0.0) -> Reading:
    metrics = {"train/loss": np.float32(2), "optim/skipped": np.float32(skipped), "moe/expert_load": np.float32([[0.5, 0.5]])}
    return Reading(step, metrics)


def test_every_step_is_recorded_and_logged_ones_say_more():
    clock, sink = Clock(), Memory()
    log = _log(clock, sink)
    for step in range(6, 12):
        clock.now += 2.0
        log.steps([_reading(step)])
    assert [record["step"] for record in sink.records] == [6, 7, 8, 9, 10, 11]
    assert [record["tokens_seen"] for record in sink.records] == [6000, 7000, 8000, 9000, 10000, 11000]
    assert sink.logged == [True, False, False, False, True, False]
    assert ["moe/expert_load" in record for record in sink.records] == sink.logged
    assert ["memory/host_bytes" in record for record in sink.records] == sink.logged
    assert sink.records[4]["speed/step_s"] == pytest.approx(2.0)
    assert sink.records[4]["speed/tokens_per_s"] == pytest.approx(500.0)
    assert sink.records[4]["speed/mfu"] == pytest.approx(500 * 1e6 / 1e10)


def test_saving_and_evaluating_do_not_count_as_training_time():
    clock, sink = Clock(), Memory()
    log = _log(clock, sink)
    log.start({})
    clock.now += 1.0
    log.steps([_reading(6)])
    with log.paused():
        clock.now += 50.0
    clock.now += 4.0
    log.steps([_reading(step) for step in range(7, 11)])
    assert sink.records[1]["speed/step_s"] == pytest.approx(1.0)
    assert sink.records[-1]["speed/step_s"] == pytest.approx(1.0)


def test_waiting_for_data_is_a_mean_per_step():
    clock, sink = Clock(), Memory()
    log = _log(clock, sink)
    log.steps([_reading(6)])
    for step in range(7, 11):
        log.add_data_wait(0.5)
        clock.now += 1.0
        log.steps([_reading(step)])
    assert sink.records[-1]["speed/data_wait_s"] == pytest.approx(0.5)


def test_mfu_is_null_where_the_peak_is_not_known():
    sink = Memory()
    log = _log(Clock(), sink, peak_flops=None)
    log.steps([_reading(6)])
    assert sink.records[0]["speed/mfu"] is None


def test_skipped_steps_add_up_on_the_console():
    screen = Screen(Console(file=io.StringIO()))
    log = Log(screen, [], first=1, total=4, every=1, tokens_per_step=1, tokens_seen=0, flops_per_token=1.0, peak_flops=None)
    log.steps([_reading(1), _reading(2, skipped=1.0), _reading(3, skipped=1.0), _reading(4)])
    assert "skipped 2" in screen._console.file.getvalue().splitlines()[-1]


def test_evaluations_and_saves_are_records_of_their_own():
    sink = Memory()
    log = _log(Clock(), sink)
    log.evaluation(10, {"eval/loss": 2.5, "eval/tokens": 1000}, 1.25)
    log.saved(10, 0.5)
    log.close()
    assert sink.records == [
        {"kind": "eval", "step": 10, "eval/seconds": 1.25, "eval/loss": 2.5, "eval/tokens": 1000},
        {"kind": "save", "step": 10, "save/seconds": 0.5},
        "closed",
    ]
    assert log.summary() == "held-out loss 2.5000 nats per token"
