#!/usr/bin/env bash
# Prolog and Epilog of slurmd: checks its node in about 5 seconds, before and after each job.
#
#   Prolog=/opt/encore/slurm/prolog.sh        in slurm.conf, on every node
#   Epilog=/opt/encore/slurm/prolog.sh
#
# Exits with 1 where the gate found the node unfit: Slurm then drains the node, and requeues the job that was to start
# (slurm.conf(5), "Prolog and Epilog Scripts"). A gate that could not run, for a wrong setting or an Encore out of reach,
# says so in slurmd's log and exits with 0: it would drain every node. Nothing is compared with other nodes here:
# `encore doctor --nodes` in a job does that. For other folders than TMPDIR, other settings or another Encore, a script
# of your own exports ENCORE_DISK, XDG_CACHE_HOME or ENCORE_PROGRAM and calls this one: slurmd hands on no variables.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
program=${ENCORE_PROGRAM:-$root/.venv/bin/encore}
[[ -x $program ]] || program=$(command -v encore || echo "$program")
readonly program

# In a job it would ask the job's nodes.
found=$(env -u SLURM_JOB_ID -u SLURM_JOB_NODELIST HOME="${HOME:-/root}" PATH="${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}" \
  "$program" doctor --nodes --quick --disk "${ENCORE_DISK:-${TMPDIR:-/tmp}}" 2>&1) && code=0 || code=$?
printf '%s\n' "$found"
if grep -q '^FAIL ' <<<"$found"; then
  exit 1
fi
if ((code)); then
  echo "the gate could not run (exit code $code): the node is not drained"
fi
