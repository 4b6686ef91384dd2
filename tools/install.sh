#!/usr/bin/env bash
# Makes .venv and installs moejax into it, editable, with what its tests need, at the versions of constraints.txt.
# Does nothing when that was done before with the same pyproject.toml and constraints.txt in the same place.
# Arguments name further extras: tools/install.sh cuda13
set -euo pipefail
cd "$(dirname "$0")/.."

is_usable() { .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

key="$(cat pyproject.toml constraints.txt <(pwd) | cksum)"
if [ "$(head -n 1 .venv/installed 2>/dev/null)" = "$key" ] && is_usable; then
    present=yes
    for extra in "$@"; do grep -qx "$extra" .venv/installed || present=no; done
    if [ $present = yes ]; then exit 0; fi
fi

start=$SECONDS
if ! is_usable; then
    python="$(tools/find_python.sh)"
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "Installing moejax and what it needs into .venv (one to five minutes the first time)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[$(IFS=,; echo "dev${*:+,$*}")]"
printf '%s\n' "$key" "$@" >.venv/installed
echo "Installed in $((SECONDS - start)) s"
