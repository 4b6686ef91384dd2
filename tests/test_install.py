"""moejax installed as users install it: the wheel, in an empty environment, away from the clone."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SHORT_RUN = (
    "--steps 3 --batch-size 4 --eval.every None --data.seq-len 32 --optim.schedule.warmup-steps 1 --model.num-layers 2 --model.embed-dim 32"
)


def run(*command, cwd: Path) -> str:
    """Output of a command that must succeed, without this process's devices, paths and virtual environment."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


def files_below(folder: Path) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return [str(file.relative_to(folder)) for file in files]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source archive, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


def test_wheel_holds_both_packages_the_configs_and_the_corpus(distributions):
    names = {name for name in zipfile.ZipFile(distributions[1]).namelist() if ".dist-info/" not in name}
    sources = {"moejax": "moejax", "configs": "moejax/configs", "kernels/moejax_kernels": "moejax_kernels"}
    assert names == {f"{inside}/{file}" for folder, inside in sources.items() for file in files_below(ROOT / folder)}
    assert {"moejax/configs/quickstart.py", "moejax/py.typed", "moejax_kernels/py.typed"} < names
    assert any(name.startswith("moejax/data/corpus/") for name in names)


def test_source_archive_holds_what_its_tests_need(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "tests/test_install.py", "tools/find_python.sh"} < names


def lowest_allowed() -> list[str]:
    """Every dependency at its lower bound, such as jax==0.11.2."""
    requirements = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    bounds = {r.name: bound.version for r in requirements for bound in r.specifier if bound.operator == ">="}
    return [f"{name}=={version}" for name, version in bounds.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dependencies", "jax_version"), [(lowest_allowed(), "0.11.2"), (["jax<0.13"], "0.12.")], ids=["oldest allowed", "newest allowed"]
)
def test_installed_wheel_trains_from_an_empty_environment(dependencies, jax_version, distributions, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    tools, away = tmp_path / "venv/bin", tmp_path / "away"
    away.mkdir()
    run(tools / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", distributions[1], *dependencies, cwd=away)
    assert run(tools / "python", "-c", "import jax; print(jax.__version__)", cwd=away).startswith(jax_version)
    assert str(ROOT) not in run(tools / "python", "-c", "import moejax, moejax_kernels as k; print(moejax.__file__, k.__file__)", cwd=away)

    assert "quickstart" in run(tools / "moejax", "--help", cwd=away)
    run(tools / "moejax", "train", "quickstart", *SHORT_RUN.split(), cwd=away)
    assert (away / "runs/quickstart").is_dir()
    text = run(tools / "moejax", "generate", "runs/quickstart", "--prompt", "ROMEO:", "--max-new-tokens", "8", cwd=away)
    assert "ROMEO:" in text
