#!/usr/bin/env bash
# Announce the image, as NGC's entry point does, and become the command.
set -euo pipefail

printf '\n== Encore stand-in for NGC MXNet: CPU only ==\n\n'
exec "$@"
