#!/usr/bin/env bash
# Checks format, lint, types and layers, then runs the default tests (not with --no-tests).
# With --fix it formats and repairs what ruff can repair first.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=yes
for argument in "$@"; do
    case "$argument" in
        --no-tests) tests=no ;;
        --fix) .venv/bin/ruff check -q --fix-only . && .venv/bin/ruff format -q . ;;
        *) echo "check.sh: unknown argument $argument; --no-tests and --fix are known" >&2 && exit 2 ;;
    esac
done

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/pyrefly check --summary=none
if [ "$tests" = yes ]; then
    .venv/bin/python -m pytest -q -n 2
else
    .venv/bin/python -m pytest -q tests/test_layering.py
fi
