"""The tool that times meshes beside each other: what it runs and prints."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from moejax.train import bench

TOOL = Path(__file__).parents[2] / "tools" / "bench_mesh.py"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_mesh.py", *words])
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    runpy.run_path(str(TOOL), run_name="__main__")


def test_each_mesh_is_set_against_the_last_one_and_its_bubble(monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(bench, "time_steps", lambda configs, repeats: seen.update(configs) or {"pp2_ep4_v2": 3.0, "dp2_ep4": 2.0})
    run(monkeypatch, "pp2_ep4_v2", "dp2_ep4", "--microbatches", "4", "--steps", "3")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (seen["pp2_ep4_v2"].mesh.pp, seen["pp2_ep4_v2"].mesh.virtual_stages, seen["dp2_ep4"].mesh.dp) == (2, 2, 2)
    assert (first["ratio"], first["bubble"]) == (1.5, pytest.approx(1 / 9, rel=1e-3))
    assert first["beyond_bubble"] == pytest.approx(1.5 * 8 / 9, rel=1e-3)
    assert (second["ratio"], second["bubble"]) == (1, 0)


@pytest.mark.parametrize(
    ("word", "sentence"), [("tp2", "mesh tp2 is not made of pp, dp, ep and v"), ("pp8_ep1", "8 stages need a MoE block each")]
)
def test_a_mesh_that_is_none_is_refused(word, sentence, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, word)
    assert sentence in capsys.readouterr().err
