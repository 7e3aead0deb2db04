"""Install packages by uv, with pip's settings on this machine: indexes, certificates, wheel folders.

    $ .venv/bin/python encore/installer.py --requirements requirements/encore.txt

Standard library only: setup.sh runs it before installing packages.
"""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

# pip settings, uv variables, and separators of multiple values.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "keyring-provider": ("UV_KEYRING_PROVIDER", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
    "retries": ("UV_HTTP_RETRIES", ""),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
}
SETTING = re.compile(r"^(global|install|:env:)\.\.?([\w-]+)=(.*)$", re.MULTILINE)


def settings(listed: str) -> dict[str, list[str]]:
    """Return the values in the output of ``pip config list`` by setting; environment variables take precedence."""
    kinds = ("global", "install", ":env:")
    matches = sorted(SETTING.findall(listed), key=lambda match: kinds.index(match[0]))
    return {name: str(ast.literal_eval(value)).split() for _, name, value in matches}


def variables(listed: str) -> dict[str, str]:
    values = settings(listed).items()
    uv_variables = {VARIABLES[name][0]: VARIABLES[name][1].join(words) for name, words in values if name in VARIABLES}
    if not {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"} & set(uv_variables):
        # PyPI's torch uses CUDA, and the environments do not contain CUDA's libraries.
        uv_variables["UV_TORCH_BACKEND"] = "cpu"
    return {**uv_variables, "UV_INDEX_STRATEGY": "first-index", "UV_NO_PROGRESS": "1"}


def environment() -> dict[str, str]:
    """Return this process's environment plus pip's settings; uv variables take precedence."""
    of_pip = tuple(sorted(item for item in os.environ.items() if item[0].startswith("PIP_")))
    return {**variables(_list_settings(of_pip)), **os.environ}


@functools.cache  # a call to pip takes a second
def _list_settings(of_pip: tuple[tuple[str, str], ...]) -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def install_command(python: Path, *arguments: str) -> list[str]:
    options = ["--no-index"] if os.environ.get("PIP_NO_INDEX", "0") not in ("", "0", "false") else []
    if {"--require-hashes", "--verify-hashes"} & set(arguments) and "UV_INDEX_STRATEGY" not in os.environ:
        # As pip: a mirror may lack a version. The hashes decide which file is installed, not the index.
        options += ["--index-strategy", "unsafe-best-match"]
    return [sys.executable, "-m", "uv", "pip", "install", "--python", str(python), *options, *arguments]


def venv_command(interpreter: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "uv", "venv", "--clear", "--python", interpreter, str(folder)]


if __name__ == "__main__":
    command = install_command(Path(sys.executable), *sys.argv[1:])
    sys.exit(subprocess.run(command, env=environment(), check=False).returncode)
