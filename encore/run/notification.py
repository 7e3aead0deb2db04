"""Notify a URL or command when a run ends: ``encore run --notify``."""

import http.client
import json
import shlex
import subprocess
import urllib.request
from collections.abc import Mapping
from typing import Any

SECONDS = 20.0


def send(target: str, content: Mapping[str, Any]) -> str:
    """POST ``content`` as JSON to a URL, or pipe it to a command. Return the error message; empty on success.

    Commands are split like shell words but run without a shell.
    """
    body = json.dumps(content).encode()
    try:
        if target.startswith(("http://", "https://")):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(target, data=body, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=SECONDS):
                return ""
        done = subprocess.run(shlex.split(target), input=body, capture_output=True, timeout=SECONDS, check=False)
    except http.client.InvalidURL:
        return "not a valid URL"  # The error has the URL, which may be secret
    except (OSError, ValueError, IndexError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        return str(error) or type(error).__name__
    messages = done.stderr.decode(errors="replace").strip().splitlines()
    return "" if done.returncode == 0 else (messages or [f"exit code {done.returncode}"])[-1]
