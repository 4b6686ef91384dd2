"""Several processes with some devices each take the steps that one process with all of them takes."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.train.processes import STEPS

pytestmark = pytest.mark.slow


def run(count: int, *, delay_s: float = 0.0, collectives: str = "gloo") -> list[list[list[float]]]:
    """The numbers of every step, of every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    running = []
    for rank in range(count):
        words = [str(rank), str(count), str(port), str(delay_s), *[collectives] * bool(collectives)]
        command = [sys.executable, "-m", "tests.train.processes", *words]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    results = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        results.append([[float(word) for word in line.split()[1:]] for line in out.splitlines() if line.startswith("step ")])
    return results


@pytest.fixture(scope="module")
def one():
    (result,) = run(1)
    assert len(result) == STEPS
    return result


@pytest.mark.parametrize("count", [2, 4])
def test_p20_processes_equal_one_to_the_bit_with_the_same_collectives(one, count):
    assert run(count) == [one] * count


def test_other_collectives_are_equal_within_rounding(one):
    np.testing.assert_allclose(run(1, collectives="")[0], one, rtol=1e-5)


def test_p22_a_process_that_starts_late_is_waited_for(one):
    assert run(2, delay_s=8.0) == [one] * 2
