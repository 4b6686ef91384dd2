"""Freed memory is used again instead of being mapped and cleared anew."""

import os
import subprocess
import sys

import pytest

SIZE = 64 * 2**20
PROGRAM = f"""
import resource, sys, jax
from moejax.parallel.host_memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def use():
    block = bytearray(b"x") * {SIZE}
for _ in range(2):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> tuple[str, int]:
    """What keep_freed_memory returned, and page faults of using 64 MiB eight times."""
    command, environment = [sys.executable, "-c", PROGRAM, word], os.environ | {"JAX_PLATFORMS": "cpu"}
    kept, count = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()
    return kept, int(count)


def test_memory_that_was_freed_is_not_cleared_again_page_by_page():
    kept, count = faults("keep")
    if kept == "False":
        pytest.skip("the C library is not GNU's")
    assert count < SIZE / 4096 / 10
    assert faults("leave")[1] > count


def test_on_accelerators_memory_is_left_alone(monkeypatch):
    from moejax.parallel import host_memory

    monkeypatch.setattr(host_memory.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    assert not host_memory.keep_freed_memory()
