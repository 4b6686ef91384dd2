"""Entry point of the command `moejax`: picks the subcommand, turns errors into one sentence and an exit code."""

import difflib
import inspect
import os
import sys
from collections.abc import Sequence

import moejax
from moejax.cli import checkpoint, generate, plan, show_config, show_schedule, train, verify
from moejax.cli import eval as eval_command
from moejax.cli.words import first_line, shipped_configs
from moejax.errors import ConfigError, DataError, MoejaxError

COMMANDS = {
    "train": train,
    "plan": plan,
    "verify": verify,
    "eval": eval_command,
    "generate": generate,
    "checkpoint": checkpoint,
    "show-config": show_config,
    "show-schedule": show_schedule,
}

_USAGE = """\
moejax {version}: training of sparse mixture-of-experts language models in JAX

usage: moejax COMMAND ...

Commands:
{commands}

Start here:
  moejax train quickstart                         two minutes on a laptop; results in runs/quickstart
  moejax generate quickstart --prompt "ROMEO:"    text from the trained model
  moejax train quickstart --mesh.ep 4             the same model, experts split over four devices
  moejax train quickstart --help                  every setting, its meaning and its value in quickstart
  moejax plan eight_layers --gpu b300             what the step of a model needs of GPUs that are not here
  moejax verify quickstart                        prove the gradients of a config on every mesh, here
  moejax COMMAND --help                           what a command does, with examples

Configs that come with moejax:
{configs}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for wrong settings or data, 1 for a run that cannot go on.

    Unexpected exceptions keep their traceback.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except MoejaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:
        # The reader of a pipe left, as in `moejax train quickstart --help | head`; closing stdout must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<15}{first_line(command.__doc__).partition(':')[0]}" for name, command in COMMANDS.items())
        print(_USAGE.format(version=moejax.__version__, commands=commands, configs=shipped_configs()), end="")
        return 0
    if words[0] == "--version":
        print(f"moejax {moejax.__version__}")
        return 0
    name, rest = words[0].replace("_", "-"), words[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean moejax {near[0]}?" if near else "moejax --help explains them"
        raise ConfigError(f"there is no command {words[0]} among {', '.join(COMMANDS)}; {hint}")
    if rest in (["-h"], ["--help"]):
        print(inspect.getdoc(COMMANDS[name]))
        if name in ("train", "plan", "verify", "show-config"):
            print(f"\nConfigs that come with moejax:\n{shipped_configs()}")
        if name == "show-schedule":
            print(f"\n{show_schedule.which_train()}")
        return 0
    return COMMANDS[name].run(rest)
