"""Say what a training step needs of GPUs that are not here: moejax plan CONFIG --gpu b300 [--compile] [settings].

CONFIG and settings are those of moejax train. Arithmetic answers at once: memory of one GPU by part, traffic by link, least time,
kernels, whether it fits, and if not, the nearest settings that do. Exit code 1 if it does not fit.

  moejax plan eight_layers --gpu b300
  moejax plan eight_layers --gpu h200 --num-gpus 16 --mesh.dp 2
  moejax plan eight_layers --gpu b300 --compile           XLA's own figures beside the arithmetic
  moejax plan eight_layers --gpu b300 --picture plan.png
  moejax plan eight_layers --help                         every setting of this config

Options beside the settings:
  --gpu NAME          h100, h200, b200, b300, gb200 or gb300
  --num-gpus N        refuse if the mesh has another number; may be left out, for the mesh says how many there are
  --compile           compile the step that trains for these GPUs, on this CPU (one to five minutes; extra cuda13, no GPU)
  --json              print JSON instead of text
  --picture FILE      draw the memory of one GPU
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.cli.words import HOW_TO_SET, check_picture, compute_on_cpu, split_options, split_subject
from moejax.config import load_config
from moejax.config.check import at_least, check
from moejax.config.overrides import apply_overrides, print_help

if TYPE_CHECKING:
    from moejax.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    gpu: str = ""
    num_gpus: int | None = None
    compile: bool = False
    json: bool = False
    picture: str | None = None

    def __post_init__(self) -> None:
        if self.num_gpus is not None:
            at_least("num_gpus", self.num_gpus, 1)
        check_picture(self.picture)


def run(words: Sequence[str]) -> int:
    """Plan as the words say, print the plan, and return 0 if it fits and 1 if it does not."""
    name, given, wants_help = split_subject(words, "a config", "moejax plan eight_layers --gpu b300")
    if wants_help:
        print_help(load_config(name), prog=f"moejax plan {name}", description=f"{__doc__.strip()}\n\n{HOW_TO_SET}")
        return 0
    own, settings = split_options(given, PlanOptions)
    options = apply_overrides(PlanOptions(), own)
    check(bool(options.gpu), f"gpu is not given; say which GPUs, as in moejax plan {name} --gpu b300")
    config = load_config(name, settings)
    compute_on_cpu()
    from moejax.plan import plan_step
    from moejax.plan.plan import can_compile

    begin = time.perf_counter()
    with _progress(options, can_compile(config)) as note:
        plan = plan_step(config, options.gpu, num_gpus=options.num_gpus, compile=options.compile)
    note(f"planned in {time.perf_counter() - begin:.1f} s")
    _show(plan, options)
    return 0 if plan.fits else 1


@contextlib.contextmanager
def _progress(options: PlanOptions, is_compilable: bool) -> Generator[Callable[[str], None]]:
    """A line on stderr that says what takes long, and a function that prints a note there."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not options.compile:
        yield lambda text: None
    elif not is_compilable:
        console.print("nothing is compiled: there is no step yet for what cannot run; the figures are arithmetic alone")
        yield lambda text: None
    else:
        if not console.is_terminal:
            console.print(f"compiling the step for {options.gpu}: one to five minutes on two cores", style="dim")
        with console.status(f"compiling the step for {options.gpu}: one to five minutes on two cores"):
            yield console.print


def _show(plan: Plan, options: PlanOptions) -> None:
    from moejax.plan.plan import as_dict
    from moejax.plan.text import lines

    print(json.dumps(as_dict(plan), indent=2) if options.json else "\n".join(lines(plan)))
    if options.picture is not None:
        from moejax.plan.picture import draw_plan

        print(f"picture: {draw_plan(plan, Path(options.picture))}", file=sys.stderr)
