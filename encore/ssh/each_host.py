"""Run a command on this host and over ssh on others: ``python -m encore.ssh.each_host --hosts n1,n2 -- COMMAND``.

A minimal pdsh. Starts the framework's launcher once per host with PET_NODE_RANK set to the host number, forwards the
environment, and terminates all hosts if one fails. Standard library only.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 0.1
NOT_EXPORTED = ("SSH_AUTH_SOCK", "_")  # Specific to this machine or shell


def script(argv: Sequence[str], variables: Mapping[str, str], folder: str, number: int) -> str:
    """Return the shell script for host ``number``, which runs the command with exactly these variables."""
    exported = {**{n: v for n, v in variables.items() if n not in NOT_EXPORTED}, "PET_NODE_RANK": str(number)}
    assignments = [f"{name}={value}" for name, value in sorted(exported.items())]
    return f"cd {shlex.quote(folder)} && exec env -i {shlex.join(assignments)} {shlex.join(argv)} </dev/null\n"


def command(host: str, *options: str) -> tuple[str, ...]:
    """Return the ssh command that reads a script from standard input, where other users cannot see it.

    Password prompts are disabled.
    """
    return ("ssh", "-o", "BatchMode=yes", *options, host, "sh -s")


def run(hosts: Sequence[str], argv: Sequence[str]) -> int:
    children = []
    for number, host in enumerate(hosts):
        # The first host is this machine, where ssh to localhost need not be allowed.
        child = subprocess.Popen(command(host) if number else ("sh", "-s"), stdin=subprocess.PIPE, text=True)
        assert child.stdin is not None
        child.stdin.write(script(argv, os.environ, str(Path.cwd()), number))
        child.stdin.close()
        children.append(child)
    try:
        while True:
            codes = [child.poll() for child in children]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(POLL_SECONDS)
    finally:
        for child in children:
            child.terminate()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 4 or arguments[0] != "--hosts" or arguments[2] != "--":
        print("expected: --hosts n1,n2 -- COMMAND", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return run(arguments[1].split(","), arguments[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
