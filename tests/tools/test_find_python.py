"""tools/find_python.sh on fabricated machines: PATH, pyenv and uv hold only what a test puts there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/find_python.sh"
REAL = sys._base_executable
GOOD = f'exec "{sys.executable}" "$@"'
OLD = "exit 1"
DEAD_SHIM = 'echo "pyenv: python3: command not found" >&2; exit 127'
WITHOUT_VENV = f'''exec "{sys.executable}" -c "import sys; sys.modules['ensurepip'] = None; exec(sys.argv[1])" "$2"'''


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing on PATH and nothing in pyenv; add(path, body) makes an executable."""

    def add(path: str, body: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
        file.chmod(0o755)
        return file

    def find() -> subprocess.CompletedProcess:
        environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
        return subprocess.run([shutil.which("bash"), SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    (tmp_path / "bin").mkdir()
    return add, find


@pytest.mark.parametrize("name", ["python3", "python3.12", "python3.13", "python3.14", "python"])
def test_a_python_on_path_is_taken_and_named_by_its_base(machine, name):
    add, find = machine
    add(f"bin/{name}", GOOD)
    assert find().stdout.strip() == REAL


@pytest.mark.parametrize("bad", [OLD, DEAD_SHIM, WITHOUT_VENV], ids=["old", "dead shim", "without venv"])
def test_candidates_that_do_not_work_are_passed_over(machine, bad):
    add, find = machine
    add("bin/python3", bad)
    add("bin/python3.12", bad)
    add("bin/python3.13", GOOD)
    assert find().stdout.strip() == REAL


def test_pyenv_is_searched_when_path_has_none(machine):
    add, find = machine
    add("bin/python3", DEAD_SHIM)
    add(".pyenv/versions/3.11.7/bin/python3", OLD)
    add(".pyenv/versions/3.13.0/bin/python3", GOOD)
    assert find().stdout.strip() == REAL


def test_pyenv_says_where_its_root_is(machine, tmp_path):
    add, find = machine
    add("bin/pyenv", f'[ "$1" = root ] && echo "{tmp_path}/elsewhere"')
    add("elsewhere/versions/3.13.0/bin/python3", GOOD)
    assert find().stdout.strip() == REAL


def test_uv_fetches_one_when_nothing_is_there(machine, tmp_path):
    add, find = machine
    fetched = add("fetched/python3.12", GOOD)
    add("bin/uv", f'case "$2" in install) >"{tmp_path}/asked" ;; find) [ -e "{tmp_path}/asked" ] && echo "{fetched}" ;; esac')
    assert find().stdout.strip() == REAL


def test_without_any_one_sentence_says_what_to_do(machine):
    add, find = machine
    add("bin/python3", OLD)
    add("bin/uv", "exit 2")
    result = find()
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.strip().splitlines()[-1].startswith("moejax needs Python 3.12 or newer")
    assert "run this again" in result.stderr
