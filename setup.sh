#!/usr/bin/env bash
# ./setup.sh [dev]: create .venv with the host side of Encore; "dev" adds what tests and lint need.
# A complete .venv is reused; an interrupted setup starts again.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly root
readonly kind=${1:-encore}
readonly requirements="$root/requirements/$kind.txt"

fail() {
  printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2
  exit 2
}

[[ -f $requirements ]] || fail "no set-up called '$kind'" "use ./setup.sh or ./setup.sh dev"

# Inputs of .venv: requirements, project file and path of the checkout.
stamp() {
  # Versions without hashes: all files of a version give the same .venv
  sed '/^ *--hash=/d; s/ \\$//' "$root/requirements/$1.txt" && cat "$root/pyproject.toml" && printf '%s' "$root"
}

# "dev" includes "encore".
is_complete() {
  local installed
  for installed in "$kind" dev; do
    [[ -f $root/.venv/made-$installed && $(<"$root/.venv/made-$installed") == "$(stamp "$installed")" ]] && return 0
  done
  return 1
}

if is_complete; then
  exit 0
fi

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.11 python3.10 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

[[ -w $root ]] || fail "$root is not writable; owner: $(stat --format=%U "$root")" "use a clone that you own"

python=$(find_python) || fail "no Python 3.10 or newer on PATH" "install python3.11, or name one: PYTHON=/path ./run.sh"
readonly python
readonly log="$root/.venv-setup.log"

exec 9>"$root/.venv-setup.lock"
if ! flock --nonblock 9; then
  echo "another process is making .venv; waiting for it" >&2
  flock 9
fi
if is_complete; then
  exit 0
fi

echo "first run: creating .venv with $python, about 20 s; then the framework's environment, up to several minutes" >&2
report_progress() {
  while sleep 5 >/dev/null 2>&1; do printf '  %d s\n' "$SECONDS" >&2; done
}
report_progress 9>&- &
readonly progress=$!
trap 'kill "$progress" 2>/dev/null || true' EXIT
if ! "$python" -m venv "$root/.venv" >"$log" 2>&1; then
  fail "$python cannot make a virtual environment; see $log" "apt-get install python3-venv (Debian, Ubuntu)"
fi
# uv, as pinned, installs the rest: in seconds, and with pip's settings.
uv="$root/.venv/uv.txt"
awk '/^uv==/ { pin = 1 } pin { print } pin && !/\\$/ { exit }' "$requirements" >"$uv"
install=("$root/.venv/bin/python" -I "$root/encore/installer.py")
if ! "$root/.venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps \
  --require-hashes --requirement "$uv" >>"$log" 2>&1 ||
  ! "${install[@]}" --no-deps --require-hashes --requirements "$requirements" >>"$log" 2>&1 ||
  ! "${install[@]}" --no-deps --editable "$root" >>"$log" 2>&1; then
  tail -n 3 "$log" >&2
  if grep -q 'No space left on device' "$log"; then
    fail "the disk is full" "free some space and run the same command again"
  fi
  fail "packages could not be installed; see $log" "check the network and pip's settings, then run the same command again"
fi
stamp "$kind" >"$root/.venv/made-$kind"
