"""Ctrl-C and SIGTERM: the first asks the loop to stop after the step it is in, one that comes GRACE_S later ends the process at once.

One request often arrives twice: GNU timeout signals its child and then the child's group, schedulers signal every process of a job.
What comes within GRACE_S of the first is therefore the same request.

Python runs signal handlers only between bytecodes of the main thread, which may be waiting for a device for minutes. So a
thread reads the numbers of arriving signals from a pipe that the interpreter's C handler writes to.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator

_WATCHED = (signal.SIGINT, signal.SIGTERM)

GRACE_S = 5.0
"""Seconds in which more signals do not mean more."""


class Stop:
    """Which signal asked for the end of the run, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, as shells have it."""
        return 0 if self.signal is None else 128 + self.signal


@contextlib.contextmanager
def watch_signals(announce: Callable[[str], None]) -> Generator[Stop]:
    """Give a Stop that the first signal sets; `announce` tells the user so. Does nothing outside the main thread."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _WATCHED}
    previous = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=_watch, args=(reader, stop, announce), name="signals", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, stop: Stop, announce: Callable[[str], None]) -> None:
    first_s = 0.0
    while numbers := os.read(reader, 1):
        if numbers[0] not in _WATCHED:
            continue
        if stop.signal is not None:
            if time.monotonic() - first_s < GRACE_S:
                continue
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # the live panel hides the cursor
                sys.stdout.flush()
            os._exit(128 + numbers[0])
        stop.signal, first_s = signal.Signals(numbers[0]), time.monotonic()
        later = f"once more in {GRACE_S:.0f} s or later to stop at once, without saving"
        announce(f"{stop.signal.name}: stopping after this step and saving; {later}")
