#!/usr/bin/env bash
# Writes constraints.txt: the version of every package that moejax and its extras need, directly or not. Run it as: tools/pin.sh
#
# The versions are the newest that fit pyproject.toml, resolved from nothing and without installing. The extra wandb is left
# open: it is a client of a service and moves with it.
set -euo pipefail
cd "$(dirname "$0")/.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$(tools/find_python.sh)" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --dry-run --report "$work/report.json" '.[cuda13,dev,tensorboard,triton]'
"$work/venv/bin/python" - "$work/report.json" >"$work/constraints.txt" <<'PYTHON'
import json
import sys

names = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
print("# Versions that moejax is developed and tested with. Written by tools/pin.sh.")
for line in sorted(f"{item['name'].lower().replace('_', '-')}=={item['version']}" for item in names if item["name"] != "moejax"):
    print(line)
PYTHON
mv "$work/constraints.txt" constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) packages"
