#!/usr/bin/env bash
# Prolog and Epilog of slurmd: checks its node in about 5 seconds, before and after each job.
#
#   Prolog=/opt/encore/slurm/prolog.sh        in slurm.conf, on every node
#   Epilog=/opt/encore/slurm/prolog.sh
#
# An exit code other than 0 makes Slurm drain the node, and requeue the job that was to start (slurm.conf(5), "Prolog and
# Epilog Scripts"). Nothing is compared with other nodes here: `encore doctor --nodes` in a job does that.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

# In a job it would ask the job's nodes.
exec env -u SLURM_JOB_ID -u SLURM_JOB_NODELIST HOME="${HOME:-/root}" PATH="${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}" \
  "$root/.venv/bin/encore" doctor --nodes --quick --disk "${TMPDIR:-/tmp}"
