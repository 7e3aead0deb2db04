#!/usr/bin/env bash
# tests/run.sh                     lint and all tests that are not marked `long`
# tests/run.sh --all               the same with the tests marked `long`
# tests/run.sh PYTEST_ARGUMENTS    only pytest, with these arguments
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Packages are installed without bytecode: without a cache, every process of a test would compile its imports again.
unset PYTHONDONTWRITEBYTECODE

case ${1:-} in
  '') selection=(-m 'not long') ;;
  --all) selection=() ;;
  *) exec .venv/bin/python -m pytest "$@" ;;
esac

folder=$(mktemp -d)
readonly folder
export ENCORE_TEST_TIMES=$folder/times
record() { printf '%s\t%d\n' "$1" "$2" >>"$ENCORE_TEST_TIMES"; }

# In the background: host-side tests come first, and a test that needs an environment waits until it is complete.
{
  .venv/bin/python -m tools.environments >"$folder/environments.log" 2>&1
  record 'environments, built during lint and host-side tests' "$SECONDS"
} &
readonly environments=$!
trap 'pkill -TERM -P "$environments" 2>/dev/null || true; kill "$environments" 2>/dev/null || true; rm -rf "$folder"' EXIT

make --no-print-directory lint
record lint "$SECONDS"

# Slurm, engines and trainings wait for timers, process starts and disks: three workers keep two cores busy. A file's
# tests share fixtures, so a worker takes files; tests/conftest.py sorts them.
.venv/bin/python -m pytest ${selection[@]+"${selection[@]}"} \
  --numprocesses 3 --dist loadfile --no-loadscope-reorder
