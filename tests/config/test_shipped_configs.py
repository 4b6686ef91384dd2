import ast
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.config import load_config, pending
from moejax.config.load import config_folder, config_names

ALL_BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "tyro", "rich"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from moejax.config import load_config, to_json
from moejax.config.load import config_names
for name in config_names():
    to_json(load_config(name))
    print(name)
"""


REFERENCE = [name for name in config_names() if name not in ("quickstart", "shakespeare_dense", "shakespeare_moe", "tiny_cpu")]


def test_configs_load_with_the_standard_library_alone() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_BLOCKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == config_names()


def test_there_are_configs() -> None:
    assert {"quickstart", "tiny_cpu", "shakespeare_moe", "shakespeare_dense"} <= set(config_names())


@pytest.mark.parametrize("name", config_names())
def test_config_is_named_documented_and_on_its_own(name: str) -> None:
    path = config_folder() / f"{name}.py"
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree) or ""
    assert load_config(name).name == name
    assert "Hardware:" in docstring
    lines = docstring.splitlines()
    assert (f"    moejax train {name}" in lines) == (not pending(load_config(name)))
    imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imports == {"moejax.config"}
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_config_says_how_to_plan_it(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((config_folder() / f"{name}.py").read_text())) or ""
    assert f"    moejax plan {name} --gpu b300" in docstring.splitlines()
    assert "Source:" in docstring


@pytest.mark.parametrize("name", config_names())
def test_commands_in_docstrings_are_valid(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((config_folder() / f"{name}.py").read_text())) or ""
    commands = [line.partition("#")[0].split() for line in docstring.splitlines() if line.startswith("    moejax ")]
    assert commands
    for _, command, config, *words in commands:
        if command in ("train", "plan"):
            load_config(config, words[2:] if command == "plan" else words)


def test_readme_lists_every_config() -> None:
    text = Path(config_folder() / "README.md").read_text()
    assert [name for name in config_names() if f"| `{name}` |" not in text] == []
