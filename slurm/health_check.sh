#!/usr/bin/env bash
# HealthCheckProgram of slurmd: drains the node with the reason from the node check. It does not resume nodes.
#
#   HealthCheckProgram=/opt/encore/slurm/health_check.sh       in slurm.conf
#   HealthCheckInterval=600
#   HealthCheckNodeState=IDLE
#
# Slurm kills it after 60 seconds. The exit code matters only when slurmd starts, which waits for 0.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

if ! output=$("$root/slurm/prolog.sh" 2>&1); then
  reason=$(sed -n 's/^FAIL //p' <<<"$output" | head -n 1)
  scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="encore: ${reason:-node check failed}"
fi
