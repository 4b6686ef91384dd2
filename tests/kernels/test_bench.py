"""What the kernel benchmark runs and reports; not how fast."""

import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax_kernels import timing
from moejax_kernels.grouped_matmul import bench

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("pattern", bench.PATTERNS)
@pytest.mark.parametrize(("rows", "experts"), [(2048, 16), (2048, 128), (7, 5), (0, 3), (10, 1)])
def test_group_sizes_hold_every_row(pattern, rows, experts):
    sizes = bench.group_sizes(rows, experts, pattern)
    assert sizes.dtype == np.int32
    assert sizes.shape == (experts,)
    assert sizes.sum() == rows
    assert sizes.min() >= 0


def test_patterns_are_what_they_say():
    even, zipf, one = (bench.group_sizes(2048, 16, pattern) for pattern in bench.PATTERNS)
    assert set(even) == {128}
    shares = 2048 / np.arange(1, 17) / (1 / np.arange(1, 17)).sum()
    assert np.abs(np.sort(zipf)[::-1] - shares).max() <= 1
    assert (np.diff(zipf) > 0).any()
    assert np.flatnonzero(one).tolist() == [8]


def test_a_case_is_reported_for_every_implementation_and_pass(monkeypatch):
    monkeypatch.setattr(bench, "_COPY_BYTES", 2**12)
    case = bench.Case(24, 8, 16, 3, "float32", "zipf")
    lines = bench.measure(case, ["cpu", "reference"], passes=["wgrad", "vjp"], repeats=1)
    assert [(line["implementation"], line["pass"]) for line in lines] == [
        ("cpu", "wgrad"),
        ("cpu", "vjp"),
        ("reference", "wgrad"),
        ("reference", "vjp"),
    ]
    for line in lines:
        assert line["ratio"] == pytest.approx(line["seconds"] / (line["dense_s"] + line["weights_s"]))
        traffic = {"wgrad": 1, "vjp": 3}[line["pass"]] * 3 * 8 * 16 * 4
        assert line["weights_s"] == pytest.approx(traffic / line["copy_bytes_per_s"])
        assert (line["rows"], line["tile"], line["padded_rows"]) == (24, 1, 24)


@pytest.mark.parametrize(("name", "products"), [("forward", 1), ("dgrad", 1), ("wgrad", 1), ("vjp", 3)])
def test_a_pass_holds_only_its_own_products(name, products):
    case = bench.Case(24, 8, 16, 3, "float32", "even")
    lowered = jax.jit(lambda *args: bench._one_pass(name, jnp.dot, *args)).lower(*bench._dense_arrays(case))
    assert lowered.as_text().count("stablehlo.dot_general") == products


def test_results_overwrite_those_of_the_call_before():
    program = timing.overwriting(lambda x: {"double": 2 * x}, jnp.arange(3.0))
    first = program()["double"]
    np.testing.assert_array_equal(first, [0, 2, 4])
    second = program()["double"]
    assert first.is_deleted()
    np.testing.assert_array_equal(second, [0, 2, 4])


def test_every_round_runs_each_program_in_turn(monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_S", 0)
    runs = []
    programs = {name: lambda name=name: (runs.append(name), jnp.zeros(1))[1] for name in "ab"}
    assert set(timing.interleaved_medians(programs, 3)) == {"a", "b"}
    assert "".join(runs) == "aabb" + "ababab"  # once to compile and once to choose the calls of a sample, then the rounds


def test_the_tool_prints_json_lines(monkeypatch, capsys):
    words = "--rows 24 --widths 8x16 --experts 3 --patterns one --implementations cpu --passes forward --repeats 1"
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *words.split()])
    monkeypatch.setattr(bench, "_COPY_BYTES", 2**12)
    runpy.run_path(str(ROOT / "tools" / "bench_kernels.py"), run_name="__main__")
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["k"], line["n"], line["pattern"], line["pass"]) == (8, 16, "one", "forward")


def test_the_tool_refuses_what_does_not_run_here_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--implementations", "mosaic"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "tools" / "bench_kernels.py"), run_name="__main__")
    assert "error: mosaic runs on H100" in capsys.readouterr().err
