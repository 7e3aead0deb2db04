#!/usr/bin/env bash
# HealthCheckProgram of slurmd: drains its node with the reason that the gate found, and never resumes it.
#
#   HealthCheckProgram=/opt/encore/slurm/health_check.sh       in slurm.conf
#   HealthCheckInterval=600
#   HealthCheckNodeState=IDLE
#
# Slurm ends it after 60 seconds and does not look at its exit code, but when slurmd starts: that waits for a 0.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

if ! found=$("$root/slurm/prolog.sh" 2>&1); then
  reason=$(sed -n 's/^FAIL //p' <<<"$found" | head -n 1)
  scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="encore: ${reason:-the gate failed}"
fi
