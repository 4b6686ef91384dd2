#!/usr/bin/env bash
# Makes .venv and installs moejax into it, editable, with what its tests need, at the versions of constraints.txt.
# Does nothing when that was done before with the same pyproject.toml and constraints.txt in the same place.
set -euo pipefail
cd "$(dirname "$0")/.."

is_usable() { .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

key="$(cat pyproject.toml constraints.txt <(pwd) | cksum)"
if [ "$(cat .venv/installed 2>/dev/null)" = "$key" ] && is_usable; then exit 0; fi

start=$SECONDS
if ! is_usable; then
    python="$(tools/find_python.sh)"
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "Installing moejax and what it needs into .venv (one to five minutes the first time)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
echo "$key" >.venv/installed
echo "Installed in $((SECONDS - start)) s"
