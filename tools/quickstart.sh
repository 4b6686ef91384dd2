#!/usr/bin/env bash
# Trains configs/quickstart.py, lets the model write, and says what to try next. Run by make quickstart, after the installation.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/moejax train quickstart
echo
.venv/bin/moejax generate runs/quickstart --prompt "ROMEO:"
cat <<'NEXT'

The run is in runs/quickstart: metrics, configuration, checkpoints and a picture. Next:

  .venv/bin/moejax train quickstart --name experts4 --mesh.ep 4       the same run with its experts split over four devices
  .venv/bin/moejax train quickstart --name wide --model.moe.num-experts 32 --model.moe.top-k 4
  .venv/bin/moejax generate runs/quickstart --prompt "To be" --temperature 0.5
  .venv/bin/moejax train --help
NEXT
