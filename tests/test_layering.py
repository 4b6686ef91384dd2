"""The shape of the code: who may import whom, and how long files and functions may be.

Add a package to LAYERS when you make one. Each test states one rule; the last tests break each rule in a small tree and see it reported.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("moejax", "kernels", "configs", "tools", "tests")

# A package imports only packages of earlier rows. Packages of one row do not import each other.
LAYERS = (
    ("errors", "testing"),
    ("config",),
    ("ops",),
    ("parallel",),
    ("nn",),
    ("models", "optim", "data"),
    ("checkpoint",),
    ("train",),
    ("eval", "generate", "plan", "verify"),
    ("cli",),
)
RANK = {package: rank for rank, row in enumerate(LAYERS) for package in row}
LIGHT = ("errors", "config")
ONLY_IN = {"flax": ("nn",), "orbax": ("checkpoint",), "grain": ("data",), "optax": ("optim", "train")}
KERNELS_NEED = ("jax", "jaxlib", "numpy", "jaxtyping", "jax_triton", "triton")
KERNEL_BODIES = ("mosaic*.py", "triton*.py")


def import_direction(root: Path) -> Iterator[str]:
    for path, module in _sources(root, "moejax"):
        package = module.split(".")[1]
        if package not in RANK:
            yield f"{path}: package {package} is in no layer; add it to LAYERS"
            continue
        for other in _imports(root / path):
            target = ([*other.split("."), ""])[1] if other.split(".")[0] == "moejax" else ""
            if target in RANK and target != package and RANK[target] >= RANK[package]:
                yield f"{path}: {package} imports {target}, which is not below it"


def third_parties(root: Path) -> Iterator[str]:
    for folder in FOLDERS[:-1]:
        for path, module in _sources(root, folder):
            package = module.split(".")[1] if folder == "moejax" else folder
            for other in sorted({name.split(".")[0] for name in _imports(root / path)}):
                if package not in ONLY_IN.get(other, (package,)):
                    yield f"{path}: imports {other}; only {' and '.join(ONLY_IN[other])} may"


def light_imports(root: Path) -> Iterator[str]:
    """Config files and what they need import no JAX, so that the command line answers at once."""
    needs = {"configs": ("moejax.config",), "moejax": ("moejax.config", "moejax.errors", "tyro")}
    for folder, names in needs.items():
        for path, module in _sources(root, folder):
            if folder == "configs" or module.split(".")[1] in LIGHT:
                for other in _imports(root / path):
                    if other.split(".")[0] not in sys.stdlib_module_names and not other.startswith(names):
                        yield f"{path}: imports {other}; the standard library and {', '.join(names)} are enough here"


def kernels_stand_alone(root: Path) -> Iterator[str]:
    for path, _ in _sources(root, "kernels"):
        for other in _imports(root / path):
            name = other.split(".")[0]
            if name not in sys.stdlib_module_names and name not in (*KERNELS_NEED, "moejax_kernels"):
                yield f"{path}: imports {other}; kernels need {', '.join(KERNELS_NEED)} only"


def file_length(root: Path) -> Iterator[str]:
    for path, _ in _all_sources(root):
        limit = 500 if _is_kernel_body(path) else 400
        lines = len((root / path).read_text().splitlines())
        if lines >= limit:
            yield f"{path}: {lines} lines; split it by idea, a file stays under {limit}"


def function_length(root: Path) -> Iterator[str]:
    for path, _ in _all_sources(root):
        limit = 150 if _is_kernel_body(path) else 60
        for node in ast.walk(_parse(root / path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := node.end_lineno - node.lineno + 1) >= limit:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines; a function stays under {limit}"


def public_names(root: Path) -> Iterator[str]:
    """A package's __init__ says what is in the folder and lists its public names, nothing else."""
    for path, _ in _all_sources(root):
        if path.name == "__init__.py":
            tree = _parse(root / path)
            if not ast.get_docstring(tree):
                yield f"{path}: has no docstring that says what is in the folder"
            for node in tree.body:
                if not _only_names(node):
                    yield f"{path}:{node.lineno}: holds more than imports and names; move it into a file of its own"


RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    import_direction,
    third_parties,
    light_imports,
    kernels_stand_alone,
    file_length,
    function_length,
    public_names,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule):
    assert list(rule(ROOT)) == []


def test_contributing_shows_these_layers():
    assert " < ".join(" | ".join(row) for row in LAYERS) in (ROOT / "CONTRIBUTING.md").read_text()


VIOLATIONS = {
    "upwards": (import_direction, "moejax/ops/norm.py", "from moejax.nn.block import Block"),
    "sideways": (import_direction, "moejax/data/text.py", "import moejax.optim.adamw"),
    "inside a function": (import_direction, "moejax/ops/norm.py", "def f():\n    from moejax import parallel"),
    "ops sees a mesh": (import_direction, "moejax/ops/norm.py", "from moejax.parallel import make_mesh"),
    "no layer": (import_direction, "moejax/misc/thing.py", "x = 1"),
    "flax outside nn": (third_parties, "moejax/models/tiny.py", "from flax import nnx"),
    "orbax outside checkpoint": (third_parties, "moejax/train/loop.py", "import orbax.checkpoint as ocp"),
    "optax in a tool": (third_parties, "tools/bench.py", "import optax"),
    "jax in config": (light_imports, "moejax/config/model.py", "import jax"),
    "jax in a config file": (light_imports, "configs/small.py", "import jax.numpy as jnp"),
    "model in a config file": (light_imports, "configs/small.py", "from moejax.models import tiny"),
    "kernel imports moejax": (kernels_stand_alone, "kernels/moejax_kernels/sort/api.py", "from moejax.errors import ConfigError"),
    "kernel imports flax": (kernels_stand_alone, "kernels/moejax_kernels/sort/api.py", "import flax"),
    "long file": (file_length, "moejax/ops/norm.py", "x = 1\n" * 400),
    "long kernel file": (file_length, "kernels/moejax_kernels/sort/mosaic_sm90.py", "x = 1\n" * 500),
    "long function": (function_length, "moejax/ops/norm.py", "class A:\n  def f():\n" + "    x = 1\n" * 59),
    "long kernel": (function_length, "kernels/moejax_kernels/sort/triton.py", "def f():\n" + "    x = 1\n" * 149),
    "no docstring": (public_names, "moejax/ops/__init__.py", "from moejax.ops.norm import norm"),
    "code in a package's __init__": (public_names, "moejax/ops/__init__.py", '"""Ops."""\ndef norm(x):\n    return x'),
}
ALLOWED = {
    "moejax/__init__.py": '"""All."""\n__version__ = "1"',
    "moejax/ops/__init__.py": '"""Ops."""\nfrom moejax.ops.norm import norm\n__all__ = ["norm"]',
    "moejax/ops/norm.py": "import jax\nfrom moejax.errors import ConfigError\nfrom moejax import config",
    "moejax/nn/block.py": "from flax import nnx\nfrom moejax.ops import norm\nimport moejax_kernels\nfrom moejax import __version__",
    "moejax/train/loop.py": "import optax\nfrom moejax.checkpoint import save\nfrom moejax.train.step import make_train_step",
    "configs/small.py": "import math\nfrom moejax.config import TrainConfig",
    "kernels/moejax_kernels/sort/mosaic_sm90.py": "import jax\nfrom moejax_kernels.sort import api\ndef f():\n" + "    x = 1\n" * 140,
    "tests/test_x.py": "import optax\nfrom flax import nnx\nfrom moejax.cli.main import main",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_good_code_passes(rule, tmp_path):
    for path, text in ALLOWED.items():
        _write(tmp_path / path, text)
    assert list(rule(tmp_path)) == []


@pytest.mark.parametrize(("rule", "path", "text"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_broken_rule_is_reported_with_its_file(rule, path, text, tmp_path):
    _write(tmp_path / path, text)
    (message,) = rule(tmp_path)
    assert message.startswith(path)


def _all_sources(root: Path) -> Iterator[tuple[Path, str]]:
    for folder in FOLDERS:
        yield from _sources(root, folder)


def _sources(root: Path, folder: str) -> Iterator[tuple[Path, str]]:
    """Python files below root/folder as (path from root, dotted name); moejax/__init__.py itself belongs to no package."""
    for file in sorted((root / folder).rglob("*.py")):
        path = file.relative_to(root)
        if str(path) != "moejax/__init__.py":
            yield path, ".".join(path.with_suffix("").parts)


def _imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from moejax import x` counts as moejax.x."""
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _only_names(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is_kernel_body(path: Path) -> bool:
    return path.parts[0] == "kernels" and any(path.match(pattern) for pattern in KERNEL_BODIES)


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
