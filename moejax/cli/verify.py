"""Prove a config's gradients on this machine: moejax verify CONFIG [--all] [--json FILE] [settings].

CONFIG, of any size, is shrunk with its structure kept: dense blocks, grouped heads, windows, experts and ranks that divide them, router,
losses, capacity. Its training step is then compiled for up to eight fake CPU devices in the ways in which the config could be run, and
losses, dropped routes and every gradient of every layer and expert are held against a dense float64 reference on one device.

A router or layer of your own takes part, if the config file puts it in its place: the reference runs it too, in float64 and without
custom derivatives. Exit code 1 if something differs; then the first thing that does is named, and what it looks like.

  moejax verify quickstart                  about three minutes: every pair of settings occurs in some case
  moejax verify path/to/mine.py --all       every combination, for hours; tools/matrix.py can be interrupted and goes on
  moejax verify quickstart --model.moe.capacity-factor 1.0

Options beside the settings:
  --all            all combinations instead of a few that hold every pair of settings
  --json FILE      write every case with its errors
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moejax.cli.words import HOW_TO_SET, compute_on_cpu, split_options, split_subject
from moejax.config import load_config
from moejax.config.check import check
from moejax.config.overrides import apply_overrides, print_help

if TYPE_CHECKING:
    from moejax.verify import Outcome

FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For programs that run once."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    all: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        if self.json is not None:
            folder = Path(self.json).absolute().parent
            check(folder.is_dir(), f"json={self.json} is to be in a directory that does not exist; make {folder} first")


def run(words: Sequence[str]) -> int:
    """Verify as the words say, with a line for each case; return 0 if nothing differs and 1 if something does."""
    name, given, wants_help = split_subject(words, "a config", "moejax verify quickstart")
    if wants_help:
        print_help(load_config(name), prog=f"moejax verify {name}", description=f"{(__doc__ or '').strip()}\n\n{HOW_TO_SET}")
        return 0
    own, settings = split_options(given, VerifyOptions)
    options = apply_overrides(VerifyOptions(), own)
    compute_on_cpu()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES}"
    config = load_config(name, settings)
    from moejax.parallel.flags import set_cpu_devices
    from moejax.verify import DEVICES, Verifier, all_cases, covering_cases, text

    set_cpu_devices(DEVICES)
    verifier = Verifier(config)
    cases = all_cases(verifier.small)
    if not options.all:
        cases = covering_cases(cases)
    print("\n".join(text.heading(config, verifier, len(cases))), flush=True)
    outcomes = verifier.run(cases, lambda outcome: print(text.line(outcome), flush=True))
    print("\n".join(text.verdict(outcomes)))
    if options.json is not None:
        Path(options.json).write_text(json.dumps([as_dict(outcome) for outcome in outcomes], indent=1))
        print(f"cases: {options.json}", file=sys.stderr)
    return 1 if any(outcome.differs or outcome.refusal for outcome in outcomes) else 0


def as_dict(outcome: "Outcome") -> dict:
    """JSON values of a case."""
    return outcome.case.values | {name: value for name, value in dataclasses.asdict(outcome).items() if name != "case"}
