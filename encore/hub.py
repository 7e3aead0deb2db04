"""Repositories of the Hugging Face Hub: list of files, access token, and manifest of the downloaded files.

`encore data get` downloads the files one by one and resumes inside a file: huggingface_hub 1.33.0 deletes partial files
when it is interrupted (`_download_to_tmp_and_move`), and a shard of Llama 2 70B has several gigabytes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from encore.catalogue import Hub
from encore.errors import EncoreError
from encore.files import file_digest

ENVIRONMENT = "hub"  # Environment with the Hub's client, `hf`
MANIFEST = "hub.json"  # Repository, commit and files, written when the download is complete
GIT_SHA1 = "git-sha1"  # Digest of files that are not in Git LFS
PAGE_SIZE = 1000  # Longer lists are paged, which is not supported here
THREADS = 8  # hashlib releases the GIL
# The client uses byte ranges after a lost connection; Xet starts a file over.
CLIENT_VARIABLES = {
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "NO_COLOR": "1",
}


class _Lfs(BaseModel):
    oid: str = Field(pattern="^[0-9a-f]{64}$")


class HubFile(BaseModel):
    """An entry of the Hub's list."""

    path: str
    size: int
    oid: str = Field(pattern="^[0-9a-f]{40}$")
    lfs: _Lfs | None = None

    @property
    def checksum(self) -> tuple[str, str]:
        return ("sha256", self.lfs.oid) if self.lfs else (GIT_SHA1, self.oid)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def page(hub: Hub) -> str:
    return f"{_endpoint()}/{'datasets/' if hub.type == 'dataset' else ''}{hub.repository}"


def listing_url(hub: Hub) -> str:
    return f"{_endpoint()}/api/{hub.type}s/{hub.repository}/tree/{hub.revision}?recursive=true"


def file_url(hub: Hub, path: str) -> str:
    return f"{page(hub)}/resolve/{hub.revision}/{quote(path)}"


def client_command(hub: Hub, folder: Path) -> list[str]:
    """Return the command of the Hub's client for the same files."""
    options = ["--repo-type", hub.type, "--revision", hub.revision or "COMMIT"]
    for pattern in hub.include:
        options += ["--include", pattern]
    return ["hf", "download", hub.repository, *options, "--local-dir", str(folder)]


def token() -> str:
    """Return the access token that the Hub's client would use: HF_TOKEN, or the file of `hf auth login`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    stored = path.read_text(encoding="utf-8") if path.is_file() else ""
    return (os.environ.get("HF_TOKEN") or stored).strip()


def denied(hub: Hub) -> EncoreError:
    accept = f"accept the license at {page(hub)}, " if hub.terms else ""
    return EncoreError(
        f"the Hub denies access to {hub.repository}" + ("" if token() else ": HF_TOKEN is not set"),
        expected=hub.terms or "an access token with permission to read the repository",
        hint=f"{accept}create a token with read access at https://huggingface.co/settings/tokens and set HF_TOKEN",
    )


def parse_listing(content: bytes, hub: Hub) -> list[HubFile]:
    """Return the files of a repository that match the patterns, from the Hub's JSON.

    Raises:
        EncoreError: the answer is not a list of files, may be incomplete, or no file matches.
    """
    try:
        entries: list[dict[str, Any]] = json.loads(content)
        adapter = TypeAdapter(list[HubFile])
        files = adapter.validate_python([entry for entry in entries if entry["type"] == "file"])
    except (ValueError, TypeError, KeyError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise EncoreError(f"{listing_url(hub)} is not a list of files: {first}", hint=f"look at {page(hub)}") from None
    matches = [file for file in files if not hub.include or any(fnmatch(file.path, name) for name in hub.include)]
    outside = [file.path for file in matches if PurePosixPath(file.path).is_absolute() or ".." in file.path.split("/")]
    if outside or not matches or len(entries) >= PAGE_SIZE:
        listed = f"{len(entries):,} entries, {len(matches):,} match {', '.join(hub.include) or '*'}"
        raise EncoreError(
            f"{hub.repository} has {f'the path {outside[0]}' if outside else listed}",
            expected=f"files in the repository's folder, and fewer than {PAGE_SIZE:,} entries",
            hint=f"look at {page(hub)}",
        )
    return matches


def digest_of(path: Path, algorithm: str) -> str:
    if algorithm != GIT_SHA1:
        return file_digest(path, algorithm)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def combined_md5(paths: Iterable[Path]) -> str:
    """Return the MD5 of the sorted MD5 of files (mlcommons/training_results_v5.1, scripts/hash.py of AMD)."""
    with ThreadPoolExecutor(THREADS) as threads:
        digests = sorted(threads.map(lambda path: file_digest(path, "md5"), paths))
    return hashlib.md5("".join(digests).encode(), usedforsecurity=False).hexdigest()


def write_manifest(folder: Path, hub: Hub, files: Sequence[HubFile]) -> None:
    listed = [{"name": file.path, "bytes": file.size, file.checksum[0]: file.checksum[1]} for file in files]
    content = {"repository": hub.repository, "type": hub.type, "revision": hub.revision, "files": listed}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return commit and files by name, as downloaded; empty without a valid manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return str(content["revision"]), {str(file["name"]): file for file in content["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return "", {}
