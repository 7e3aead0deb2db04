#!/usr/bin/env bash
# tests/all.sh [pytest's arguments]: every test; those of the host side while the frameworks' environments are made.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
readonly host_side='not training and not engine and not cluster and not gpu'

# The environments are installed without compiled files: each of some hundred processes would compile what it imports.
unset PYTHONDONTWRITEBYTECODE

if (($#)); then
  exec .venv/bin/python -m pytest "$@"
fi

# Installing packages and compiling Horovod leave cores idle by themselves.
log=$(mktemp)
readonly log
.venv/bin/python -m tools.environments >"$log" 2>&1 &
readonly environments=$!
trap 'kill "$environments" 2>/dev/null || true; rm -f "$log"' EXIT
.venv/bin/python -m pytest -m "$host_side" --numprocesses auto --maxprocesses 8 --dist worksteal
if ! wait "$environments"; then
  cat "$log" >&2
  exit 1
fi
# Slurm, engines and trainings wait for timers, starts and files: three at once keep two cores at work. What a file's
# tests share is made once. The order is that of tests/conftest.py, and not by the number of a file's tests.
.venv/bin/python -m pytest -m "not ($host_side)" --numprocesses 3 --dist loadfile --no-loadscope-reorder
