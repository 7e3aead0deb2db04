#!/usr/bin/env bash
# Announce the image, as NGC's entry point does, and become the command.
set -euo pipefail

printf '\n== Encore stand-in for NGC %s: CPU only ==\n\n' "${STANDIN_FOR:-}"
exec "$@"
