"""constraints.txt, pyproject.toml and the Dockerfile name the same packages and versions."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "tools/Dockerfile").read_text()
PINNED_EXTRAS = ("cuda13", "dev", "tensorboard", "triton")


def requirements() -> list[Requirement]:
    extras = [line for extra in PINNED_EXTRAS for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in [*PROJECT["dependencies"], *extras]]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_pin_is_a_name_and_a_version():
    assert all(name == canonicalize_name(name) and re.fullmatch(r"[0-9][\w.]*", version) for name, version in pins().items())


def test_every_dependency_is_pinned_within_its_range():
    for requirement in requirements():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)], prereleases=True), requirement


def test_pin_script_resolves_the_same_extras():
    assert f"'.[{','.join(PINNED_EXTRAS)}]'" in (ROOT / "tools/pin.sh").read_text()


def test_dockerfile_installs_the_dependencies_and_nothing_else():
    installed = re.search(r"^RUN pip install [^\n]*\\\n((?:    [^\n]*\n)+)", DOCKERFILE, re.MULTILINE).group(1)
    words = {word for word in installed.split() if word != "\\"}
    wanted = {f"{r.name}[cuda13]" if r.name == "jax" else r.name for r in requirements()}
    assert words == wanted


def test_dockerfile_takes_its_versions_from_the_constraints():
    assert "COPY constraints.txt /opt/moejax/constraints.txt" in DOCKERFILE
    assert "--constraint /opt/moejax/constraints.txt" in DOCKERFILE
    assert re.search(r'^LABEL jax="(.*)"', DOCKERFILE, re.MULTILINE).group(1) == pins()["jax"]


def test_cuda_of_the_image_is_the_cuda_of_the_extra():
    image = re.search(r"^FROM nvidia/cuda:(\d+)\.", DOCKERFILE, re.MULTILINE).group(1)
    assert f"jax-cuda{image}-plugin" in pins()
