#!/usr/bin/env bash
# Install what the engine tests need, as root on Debian or Ubuntu; elsewhere report why not.
set -euo pipefail

readonly packages=(
  debootstrap
  docker.io
  podman
)

if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "NO CONTAINER ENGINE: not root on Debian, so the engine tests cannot install Docker and Podman" >&2
  exit 3
fi
if ! command -v dockerd >/dev/null || ! command -v podman >/dev/null || ! command -v debootstrap >/dev/null; then
  apt-get update -qq
  # Without this, the package would start its daemon; the tests start their own.
  readonly policy=/usr/sbin/policy-rc.d
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
fi
