"""The console: plain lines, the live panel, short numbers."""

import io
from collections import deque

import pytest
from rich.console import Console

from moejax.train.console import Screen, duration, line, panel, short, sparkline

FACTS = {"step": 40, "train/loss": 2.51236, "optim/grad_norm": 0.9222, "optim/lr": 3e-3, "moe/drop_fraction": 0.0123, "moe/max_load": 1.834}
FACTS |= {"speed/step_s": 0.2134, "speed/tokens_per_s": 19234.0, "speed/model_flops_per_s": 4.2e14, "speed/mfu": 0.424}
FACTS |= {"eta_s": 77.0, "skipped": 2}


def test_a_line_says_everything_in_one_row():
    assert line(FACTS, 400) == (
        "step  40/400  loss 2.5124  19.2k tok/s  420 TFLOP/s  42.4 % MFU  grad 0.922  lr 3.00e-03  drop 1.2 %  load 1.83x  "
        "0.213 s/step  ETA 1m17s  skipped 2"
    )


def test_a_line_without_experts_peak_or_finite_loss():
    facts = {"step": 1, "train/loss": None, "optim/grad_norm": None, "optim/lr": 0.0, "speed/model_flops_per_s": 5.5e9, "speed/mfu": None}
    assert line(facts, 9) == "step 1/9  loss not finite  - tok/s  5.5 GFLOP/s  - MFU  grad not finite  lr 0.00e+00  - s/step  ETA -"


def test_the_panel_shows_the_same_figures():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(panel(FACTS | {"eval/loss": 2.6}, deque([3.0, 2.5, 2.0]), "quickstart", 400))
    text = console.file.getvalue()
    for figure in ("quickstart", "step 40/400", "10 %", "ETA 1m17s", "2.5124", "2.6000", "19.2k", "420", "42.4 %", "1.83x", "1.2 %", "█▅▁"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_terminal_gets_the_panel_and_no_lines():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Screen(console) as screen:
        screen.start_live("quickstart", 400)
        screen.show_step(FACTS, is_logged=True)
    assert "held-out loss" in console.file.getvalue()
    assert "19.2k tok/s" not in console.file.getvalue()


def test_a_file_gets_lines_of_logged_steps_unwrapped():
    console = Console(file=io.StringIO(), width=40)
    with Screen(console) as screen:
        screen.start_live("quickstart", 400)
        screen.show_step(FACTS | {"step": 39}, is_logged=False)
        screen.show_step(FACTS, is_logged=True)
    assert console.file.getvalue() == line(FACTS, 400) + "\n"


def test_sentences_are_printed_as_they_are():
    console = Console(file=io.StringIO(), width=40)
    Screen(console).say("data  [bold]not markup[/bold] " + 60 * "x")
    assert console.file.getvalue() == "data  [bold]not markup[/bold] " + 60 * "x" + "\n"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (12345, "12.3k"), (47.2e6, "47.2M"), (7.1e9, "7.1B"), (1.5e12, "1.5T")]
)
def test_short_numbers(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0s"), (42, "42s"), (185, "3m05s"), (7620, "2h07m"), (3 * 86400 + 4 * 3600, "3d04h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_sparkline_fits_the_width_and_spans_the_range():
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([float(number) for number in range(100)], 8) == "▁▂▃▄▅▆▇█"
