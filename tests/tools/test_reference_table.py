"""The table of reference points in configs/README.md is the one that the configs give."""

import importlib.util
from pathlib import Path

import pytest

from moejax.config import SYSTEM_REFERENCE
from moejax.plan.estimate import estimate, usable_bytes

TOOL = Path(__file__).parents[2] / "tools/reference_table.py"
spec = importlib.util.spec_from_file_location("reference_table", TOOL)
assert spec is not None and spec.loader is not None  # noqa: PT018
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def test_the_readme_is_up_to_date():
    text = reference.README.read_text(encoding="utf-8")
    assert reference.updated(text) == text, "run python tools/reference_table.py"


def test_every_figure_is_said_to_be_a_system_reference():
    assert SYSTEM_REFERENCE in reference.table()
    assert any(reference.config_of(point).model.is_system_reference for point in reference.POINTS)


@pytest.mark.parametrize("point", reference.POINTS, ids=lambda point: point.name)
def test_p47_every_reference_point_fits_the_gpus_it_names(point):
    figures = estimate(reference.config_of(point), reference.GPU)
    assert figures.total_bytes <= usable_bytes(figures.gpu)
