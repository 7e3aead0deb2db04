#!/usr/bin/env bash
# ./run.sh BENCHMARK GPUS [options]: create .venv once, then run `encore run BENCHMARK GPUS [options]`.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly root

"$root/setup.sh"
exec "$root/.venv/bin/encore" run "$@"
