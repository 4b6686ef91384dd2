#!/usr/bin/env bash
# Prints the path of a Python 3.12 or newer that can make virtual environments.
#
# Looks on PATH, then among pyenv's versions, then asks uv to fetch one. Every candidate is run, not only found: a pyenv shim
# may exist for a version that is not active, and a system Python may come without venv.
set -euo pipefail

# Prints the real interpreter behind the candidate $1 if it is good enough. An interpreter of a virtual environment names its base.
try() {
    "$1" -c '
import sys
if sys.version_info < (3, 12):
    sys.exit(1)
import ensurepip, venv
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}

for name in python3 python3.12 python3.13 python3.14 python; do
    if command -v "$name" >/dev/null && try "$name"; then exit 0; fi
done

pyenv_root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-/nonexistent}/.pyenv")}"
for candidate in "$pyenv_root"/versions/*/bin/python3; do
    if [ -x "$candidate" ] && try "$candidate"; then exit 0; fi
done

if command -v uv >/dev/null; then
    echo "Fetching Python 3.12 with uv" >&2
    if uv python install --quiet 3.12 >&2 && candidate="$(uv python find --system 3.12)" && try "$candidate"; then exit 0; fi
fi

echo "moejax needs Python 3.12 or newer with its venv module, and none was found on PATH, among pyenv's versions or through uv:" \
    "install one (a package manager, pyenv or uv will do) and run this again" >&2
exit 1
