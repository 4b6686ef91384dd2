"""Print a config with all its values: moejax show-config CONFIG [settings] [--json].

CONFIG and settings are those of moejax train; nothing is run. Values that the settings changed show what the config file says.

  moejax show-config quickstart
  moejax show-config quickstart --mesh.ep 4 --model.moe.num-experts 64
  moejax show-config quickstart --json          the form that is saved with a run
"""

from collections.abc import Iterator, Sequence

from moejax.cli.words import split_subject
from moejax.config import TrainConfig, load_config, to_json
from moejax.config.load import find_config
from moejax.config.settings import settings


def run(words: Sequence[str]) -> int:
    """Print the resolved config."""
    name, changes, wants_help = split_subject(words, "a config", "moejax show-config quickstart")
    if wants_help:
        print(__doc__.strip())
        return 0
    as_json = "--json" in changes
    config = load_config(name, [word for word in changes if word != "--json"])
    if as_json:
        print(to_json(config), end="")
        return 0
    print(f"# {find_config(name)}")
    print("\n".join(_lines(load_config(name), config)))
    return 0


def _lines(before: TrainConfig, after: TrainConfig) -> Iterator[str]:
    """One line for each setting, with an empty line between groups."""
    old = {setting.name: setting.value for setting in settings(before)}
    width = max(len(setting.name) for setting in settings(after))
    group = ""
    for setting in settings(after):
        if setting.name.rpartition(".")[0] != group:
            group = setting.name.rpartition(".")[0]
            yield ""
        changed = setting.name in old and old[setting.name] != setting.value
        yield f"{setting.name:<{width}}  {_text(setting.value)}" + (f"    # config file: {_text(old[setting.name])}" if changed else "")


def _text(value: object) -> str:
    return " ".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)
