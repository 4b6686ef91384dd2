import threading
import time

import pytest

from moejax.data import prefetch


def settle(condition) -> bool:
    """Whether the condition becomes true within five seconds."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_items_come_in_order_and_end():
    with prefetch(lambda step: step * step, 3, 8) as items:
        assert list(items) == [9, 16, 25, 36, 49]
        with pytest.raises(StopIteration):
            next(items)


def test_no_steps_is_no_items():
    with prefetch(lambda step: step, 5, 5) as items:
        assert list(items) == []


def test_only_depth_items_are_made_ahead():
    made = []
    with prefetch(made.append, 0, 100, depth=3) as items:
        assert settle(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3
        next(items)
        assert settle(lambda: len(made) == 4)


def test_an_error_comes_in_place_of_its_item_and_stays():
    def fail_at_two(step: int) -> int:
        if step == 2:
            raise ValueError("step 2 is broken")
        return step

    with prefetch(fail_at_two, 0, 10) as items:
        assert [next(items), next(items)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="step 2 is broken"):
                next(items)


def test_waiting_time_is_that_of_the_last_item():
    gate = threading.Event()

    def wait_for_gate(step: int) -> int:
        if step == 1:
            gate.wait()
        return step

    with prefetch(wait_for_gate, 0, 3) as items:
        next(items)
        threading.Timer(0.5, gate.set).start()
        next(items)
        assert items.wait_s > 0.1
        assert settle(lambda: items._results.qsize() > 0)
        next(items)
        assert items.wait_s < 0.4


def test_closing_ends_the_thread_whatever_it_waits_for():
    items = prefetch(lambda step: step, 0, 10**9)
    next(items)
    items.close()
    items.close()
    assert not items._thread.is_alive()
    with pytest.raises(StopIteration):
        next(items)


def test_leaving_the_block_with_an_error_ends_the_thread():
    items = prefetch(lambda step: step, 0, 10**9)
    with pytest.raises(KeyboardInterrupt), items:
        raise KeyboardInterrupt
    assert not items._thread.is_alive()
