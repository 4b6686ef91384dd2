"""The inner loop on a fake device that writes down who asked for what, and when."""

import itertools

import numpy as np
import pytest

from moejax.errors import TrainingError
from moejax.train.metrics import Reading
from moejax.train.signals import Stop
from moejax.train.steps import FiniteGuard, run_steps


class FakeDevice:
    """A step whose metrics note when they are read. They are ready at once, or only when they are waited for."""

    def __init__(self, *, is_ready: bool):
        self.events: list[tuple[str, int]] = []
        self.is_ready = is_ready
        self.count = 0

    def step(self, state, batch):
        self.count += 1
        self.events.append(("enqueue", self.count))
        return state + batch, {"train/loss": FakeArray(self, self.count)}


class FakeArray:
    def __init__(self, device: FakeDevice, step: int):
        self.device, self.step = device, step

    def is_ready(self) -> bool:
        return self.device.is_ready

    def __array__(self, dtype=None, copy=None):
        self.device.events.append(("read", self.step))
        return np.asarray(0.5 * self.step, np.float32)


def _run(device: FakeDevice, *, last: int, every: int, stop: Stop | None = None, poll=lambda: None):
    readings: list[Reading] = []
    state, done = run_steps(
        device.step,
        0,
        itertools.repeat(1),
        first=1,
        last=last,
        stop=stop or Stop(),
        report=readings.extend,
        is_logged=lambda step: step % every == 0,
        poll=poll,
    )
    return state, done, readings


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_step_n_plus_1_is_enqueued_before_anything_of_step_n_is_read(is_ready, every):
    device = FakeDevice(is_ready=is_ready)
    _run(device, last=12, every=every)
    for step in range(1, 12):
        assert device.events.index(("enqueue", step + 1)) < device.events.index(("read", step))


def test_every_step_is_read_once_and_reported_in_order():
    state, done, readings = _run(FakeDevice(is_ready=True), last=10, every=3)
    assert (state, done) == (10, 10)
    assert [(reading.step, float(reading.metrics["train/loss"])) for reading in readings] == [(step, 0.5 * step) for step in range(1, 11)]


def test_the_host_waits_for_a_busy_device_only_to_log_and_not_to_run_too_far_ahead():
    device = FakeDevice(is_ready=False)
    _run(device, last=20, every=8)
    enqueued_when_read = {}
    for index, (what, step) in enumerate(device.events):
        if what == "read":
            enqueued_when_read[step] = max(number for kind, number in device.events[:index] if kind == "enqueue")
    ahead = {step: enqueued - step for step, enqueued in enqueued_when_read.items() if step <= 16}
    assert ahead == {step: 1 if step in (8, 16) else min(4, (8 if step <= 8 else 16) + 1 - step) for step in range(1, 17)}


def test_a_signal_ends_the_loop_after_the_step_it_came_in():
    stop, device = Stop(), FakeDevice(is_ready=False)

    def poll():
        if device.count == 4:
            stop.signal = 15

    _, done, readings = _run(device, last=20, every=100, stop=stop, poll=poll)
    assert done == 5
    assert [reading.step for reading in readings] == [1, 2, 3, 4, 5]


def test_what_went_wrong_in_the_background_stops_the_next_step():
    device = FakeDevice(is_ready=False)

    def poll():
        if device.count == 3:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        _run(device, last=20, every=100, poll=poll)
    assert device.count == 3


def _finite(*flags: float) -> list[Reading]:
    return [Reading(step, {"optim/finite": np.float32(flag)}) for step, flag in enumerate(flags, start=1)]


def test_five_steps_in_a_row_that_are_not_finite_end_training():
    guard = FiniteGuard(lambda: "the newest checkpoint is 5")
    guard.check(_finite(1, 0, 0, 0, 0, 1, 0, 0, 0, 0))
    with pytest.raises(TrainingError, match=r"in steps 7 to 11, none of which was applied; the newest checkpoint is 5\..*optim\.lr"):
        guard.check([Reading(11, {"optim/finite": np.float32(0)})])
