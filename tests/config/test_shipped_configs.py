import ast
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.config import load_config
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
    assert f"    moejax train {name}\n" in f"{docstring}\n"
    imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imports == {"moejax.config"}
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))


def test_readme_lists_every_config() -> None:
    text = Path(config_folder() / "README.md").read_text()
    assert [name for name in config_names() if f"| `{name}` |" not in text] == []
