#!/usr/bin/env bash
# Prolog and Epilog of slurmd: check the node in about 5 seconds, before and after every job.
#
#   Prolog=/opt/encore/slurm/prolog.sh        in slurm.conf, on every node
#   Epilog=/opt/encore/slurm/prolog.sh
#
# Exits with 1 if the node fails the checks: Slurm drains the node and requeues the job (slurm.conf(5), "Prolog and
# Epilog Scripts"). If the checks cannot run (wrong settings, Encore not found), the script logs it to slurmd's log and
# exits with 0, because it would drain all nodes otherwise. Comparing nodes requires `encore doctor --nodes` in a job.
# To change the test folder (TMPDIR), settings or Encore, call this script from one that exports ENCORE_DISK,
# XDG_CACHE_HOME or ENCORE_PROGRAM: slurmd does not pass its environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
program=${ENCORE_PROGRAM:-$root/.venv/bin/encore}
[[ -x $program ]] || program=$(command -v encore || echo "$program")
readonly program

# Inside a job, doctor would check all nodes of the job.
output=$(env -u SLURM_JOB_ID -u SLURM_JOB_NODELIST HOME="${HOME:-/root}" PATH="${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}" \
  "$program" doctor --nodes --quick --disk "${ENCORE_DISK:-${TMPDIR:-/tmp}}" 2>&1) && code=0 || code=$?
printf '%s\n' "$output"
if grep -q '^FAIL ' <<<"$output"; then
  exit 1
fi
if ((code)); then
  echo "the node check could not run (exit code $code): the node is not drained"
fi
