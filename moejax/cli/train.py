"""Train a model, or continue a run: moejax train CONFIG [settings].

CONFIG is the name of a config that comes with moejax, or the path of a Python file with `def config() -> TrainConfig`.
Settings change it for this run: numbers, names and switches, by their dotted names. They are checked together, before
anything is compiled.

  moejax train quickstart
  moejax train quickstart --mesh.dp 2 --mesh.ep 4
  moejax train quickstart --model.moe.num-experts 64 --optim.lr 1e-3 --name wide
  moejax train path/to/mine.py --data.source files --data.paths a.npy b.npy --data.eos-id 0
  moejax train quickstart --help          every setting, its meaning and its value in quickstart
  moejax show-config quickstart           the values alone

Results go to runs/NAME (--run-dir takes another directory): config.json with every setting, metrics.jsonl, checkpoints/, a
picture run.png, and a trace in profile/ with --profile. The same command again continues from the newest checkpoint, also on
another mesh; settings that would make it another run are listed and refused (--resume changed accepts them). Ctrl-C saves
and stops.

On a CPU the devices of the mesh are made up, so that any --mesh.dp and --mesh.ep can be tried; on GPUs they have to exist.
"""

import ast
from collections.abc import Sequence

from moejax.cli.words import HOW_TO_SET, split_subject
from moejax.config import load_config, refuse_pending
from moejax.config.load import find_config


def run(words: Sequence[str]) -> int:
    """Train as the words say and return the exit code of the run."""
    name, settings, wants_help = split_subject(words, "a config", "moejax train quickstart")
    config = load_config(name, settings)
    if wants_help:
        from moejax.config.overrides import print_help

        about = ast.get_docstring(ast.parse(find_config(name).read_bytes())) or ""
        print_help(config, prog=f"moejax train {name}", description=f"{about}\n\n{HOW_TO_SET}")
        return 0
    refuse_pending(config)
    # The number of CPU devices has to be known before anything touches one.
    from moejax.parallel.flags import require_devices, set_cpu_devices
    from moejax.parallel.host_memory import keep_freed_memory
    from moejax.parallel.pipeline import check_schedule

    check_schedule(config)
    set_cpu_devices(config.mesh.num_devices)
    keep_freed_memory()
    print(require_devices(config.mesh), flush=True)
    from moejax.plan.room import check_room

    check_room(config)
    from moejax.train.loop import train

    return train(config)
