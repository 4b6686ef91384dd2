"""Evaluate a checkpoint on held-out text: moejax eval RUN [--step N] [settings].

RUN is a run directory, or its name below runs/. The newest checkpoint is taken unless --step names another. The mesh need
not be the one of training.

  moejax eval quickstart
  moejax eval runs/quickstart --step 200 --mesh.ep 4 --eval.sequences 1024
  moejax eval quickstart --help          every setting and its value in that run
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from moejax.cli.words import HOW_TO_SET, find_run, split_subject, warn_of_reference
from moejax.config import EvalConfig, MeshConfig, read_config
from moejax.config.overrides import apply_overrides, print_help


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    sequences: int
    """Held-out sequences at most; the same ones every time."""
    batch_size: int | None
    """Sequences evaluated at once. None: one microbatch of training."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    step: int | None = None
    """Step of the checkpoint. None: the newest."""
    mesh: MeshConfig
    """Devices and how work is split over them."""
    eval: HeldOutText
    """How much text."""


def run(words: Sequence[str]) -> int:
    """Evaluate as the words say and print the results."""
    name, changes, wants_help = split_subject(words, "a run", "moejax eval quickstart")
    run_dir = find_run(name)
    trained = read_config(run_dir)
    options = EvalOptions(
        mesh=trained.mesh,
        eval=HeldOutText(sequences=trained.eval.sequences, batch_size=trained.eval.batch_size),
    )
    options = apply_overrides(options, changes)
    if wants_help:
        print_help(options, prog=f"moejax eval {name}", description=f"Evaluate the run in {run_dir} on held-out text.\n\n{HOW_TO_SET}")
        return 0
    warn_of_reference(trained)
    settings: EvalConfig = dataclasses.replace(trained.eval, **dataclasses.asdict(options.eval))
    from moejax.parallel.flags import require_devices, set_cpu_devices
    from moejax.parallel.host_memory import keep_freed_memory

    set_cpu_devices(options.mesh.num_devices)
    keep_freed_memory()
    print(require_devices(options.mesh), flush=True)
    from moejax.eval import run_eval

    results = run_eval(run_dir, step=options.step, mesh=options.mesh, eval=settings)
    width = max(map(len, results))
    for key, value in results.items():
        print(f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}")
    return 0
