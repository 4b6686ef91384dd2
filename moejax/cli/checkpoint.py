"""Look at checkpoints and manage them: moejax checkpoint inspect | verify | diff | prune | average ...

Needs no accelerator and no model. CHECKPOINT is a run (its directory, or its name below runs/), which stands for its newest checkpoint, or
RUN@STEP for another. Any checkpoint goes on any mesh as it is (moejax train ... --mesh.ep 8), so there is nothing to reshard.

  moejax checkpoint inspect quickstart [--depth 2] [--json]     what it holds, who wrote it, how far training was
  moejax checkpoint verify quickstart                            every file against its checksum; exit code 1 if something is broken
  moejax checkpoint diff quickstart@200 quickstart@400           settings, arrays, shapes, numbers; exit code 1 if they differ
  moejax checkpoint prune quickstart --keep 2 [--keep-every 1000] [--dry-run]
  moejax checkpoint average a@100 a@200 a@300 --out averaged [--decay 0.5]
                                     the mean of the weights (with --decay each weighs that much less than the next), to evaluate
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from moejax.cli.words import HELP, compute_on_cpu, find_run
from moejax.config import CONFIG_FILE
from moejax.config.check import at_least, check
from moejax.config.overrides import apply_overrides
from moejax.errors import CheckpointError, ConfigError

_GIB = 2**30

Place = tuple[Path, int]
"""A directory of checkpoints, and a step."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of verbs that have none."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    depth: int = 2
    """Names of an array that make a line."""
    json: bool = False
    """Print the whole manifest."""

    def __post_init__(self) -> None:
        at_least("depth", self.depth, 1)


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    keep: int | None = None
    """Newest checkpoints that stay."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay too."""
    dry_run: bool = False
    """Only say what would be deleted."""

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    out: str | None = None
    """New run directory."""
    decay: float | None = None
    """Weight of a checkpoint over that of the next one. None: all weigh the same."""

    def __post_init__(self) -> None:
        check(self.decay is None or 0 < self.decay <= 1, f"decay={self.decay} is not in (0, 1]; 0.5 halves the weight with every step back")


def run(words: Sequence[str]) -> int:
    """Do what the first word says; return 0, or 1 if something is broken or differs."""
    if any(word in HELP for word in words):
        print((__doc__ or "").strip())
        return 0
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb not in _VERBS:
        given = f"{verb} is nothing that can be done with a checkpoint" if verb else "what to do is missing"
        raise ConfigError(f"{given}; write {', '.join(_VERBS)}, as in moejax checkpoint inspect quickstart")
    act, options, least, most = _VERBS[verb]
    names = list(takewhile(lambda word: not word.startswith("--"), rest))
    if not least <= len(names) <= most:
        wanted = f"{least} checkpoint" + "s" * (least > 1) + " or more" * (most > least)
        raise ConfigError(f"moejax checkpoint {verb} takes {wanted}, not {len(names)}; name them first, each as RUN or RUN@STEP")
    settings = apply_overrides(options(), rest[len(names) :])
    compute_on_cpu()
    return act(names, settings)


def _inspect(names: list[str], options: InspectOptions) -> int:
    from moejax.checkpoint import branches, read_manifest

    directory, step = _place(names[0])
    manifest = read_manifest(directory, step)
    if options.json:
        print(json.dumps(manifest, indent=1))
        return 0
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    print(f"checkpoint {directory / str(step)}: {len(manifest['files'])} files, {size / _GIB:,.3f} GiB on disk")
    for name, words in (("tokens_seen", "tokens trained on"), ("samples_seen", "sequences trained on")):
        if name in manifest:
            print(f"  {manifest[name]:>20,}  {words}")
    if "average" in manifest:
        print(f"  average of {', '.join(manifest['average']['of'])}")
    if mesh := manifest.get("config", {}).get("mesh"):
        print(f"  written on mesh.pp={mesh['pp']} x mesh.dp={mesh['dp']} x mesh.ep={mesh['ep']}; goes on any other")
    print(f"  written by {versions}")
    rows = branches(manifest, options.depth)
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, numbers, amount in rows:
        print(f"  {name:<{width}}  {numbers:>18,} numbers  {amount / _GIB:>12,.4f} GiB")
    return 0


def _verify(names: list[str], options: NoOptions) -> int:
    from moejax.checkpoint import broken

    directory, step = _place(names[0])
    try:
        problems = broken(directory, step, _Note())
    except CheckpointError as error:
        problems = [str(error)]
    for problem in problems:
        print(problem)
    print(f"checkpoint {directory / str(step)} " + (f"is broken: {len(problems)} problems" if problems else "is as it was written"))
    return 1 if problems else 0


def _diff(names: list[str], options: NoOptions) -> int:
    from moejax.checkpoint import compare

    found = compare(_place(names[0]), _place(names[1]), _Note())
    for title, lines in (
        ("settings", found.settings),
        (f"arrays of {names[0]} alone", found.only_a),
        (f"arrays of {names[1]} alone", found.only_b),
        ("shapes", found.shapes),
        ("numbers", [f"{c.name}: by up to {c.absolute:.3g}, {c.relative:.3g} of the largest" for c in found.changes]),
    ):
        if lines:
            print("\n  ".join([f"{title} that differ:" if title in ("settings", "shapes", "numbers") else f"{title}:", *lines]))
    print(f"{found.equal} arrays are equal to the bit")
    return 1 if found.differs else 0


def _prune(names: list[str], options: PruneOptions) -> int:
    from moejax.checkpoint import committed_steps, prune

    check(options.keep is not None, "keep is not given; say how many of the newest checkpoints stay, as in --keep 3")
    assert options.keep is not None
    check("@" not in names[0], f"{names[0]} names one checkpoint; prune takes a whole run")
    directory = find_run(names[0]) / "checkpoints"
    gone = prune(directory, keep=options.keep, keep_every=options.keep_every, is_dry=options.dry_run, say=print)
    stay = [step for step in committed_steps(directory) if step not in gone]
    print(f"{len(gone)} of {len(gone) + len(stay)} checkpoints {'would go' if options.dry_run else 'are gone'}; there stay {_listed(stay)}")
    return 0


def _average(names: list[str], options: AverageOptions) -> int:
    from moejax.checkpoint import average

    check(options.out is not None, "out is not given; name a new run directory, as in --out averaged")
    out = Path(options.out or "")
    check(not out.exists(), f"out={out} exists; name a new run directory")
    places = [_place(name) for name in names]
    text = (places[-1][0].parent / CONFIG_FILE).read_text(encoding="utf-8")
    step = average(places, out / "checkpoints", decay=options.decay, say=_Note())
    (out / CONFIG_FILE).write_text(text, encoding="utf-8")
    print(f"checkpoint {out / 'checkpoints' / str(step)}")
    print(f"evaluate   moejax eval {out}")
    return 0


def _place(name: str) -> Place:
    """The checkpoint that RUN or RUN@STEP stands for."""
    from moejax.checkpoint import committed_steps

    run_name, _, word = name.partition("@")
    directory = find_run(run_name) / "checkpoints"
    steps = committed_steps(directory)
    if not steps:
        raise CheckpointError(f"{directory.parent} holds no checkpoint yet; train it first, or wait for the first save")
    check(word == "" or word.isdecimal(), f"{name} does not end in a step; write it as {run_name}@{steps[-1]}")
    return directory, int(word) if word else steps[-1]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


class _Note:
    """Prints progress on stderr, a line every other second at most."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + 2

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + 2
            print(text, file=sys.stderr, flush=True)


_VERBS: dict[str, tuple[Callable[..., int], type, int, int]] = {
    "inspect": (_inspect, InspectOptions, 1, 1),
    "verify": (_verify, NoOptions, 1, 1),
    "diff": (_diff, NoOptions, 2, 2),
    "prune": (_prune, PruneOptions, 1, 1),
    "average": (_average, AverageOptions, 2, 1000),
}
"""What does it, its options, and how many checkpoints it takes at least and at most."""
