"""``encore data get``: real downloaders with a server on this machine."""

import _thread
import gzip
import hashlib
import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.common.data import published
from benchmarks.translation import wmt
from encore import catalogue, download
from encore.cli.app import app
from encore.errors import EncoreError, ExitCode

TEXT = bytes(range(256)) * 4096
MD5 = hashlib.md5(TEXT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves ``files`` with ranges; sends half of the file ``interrupted``, then interrupts this process."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.interrupted = ""
        self.partial_file = Path()  # Written by the downloader
        self.requests: list[tuple[str, str]] = []  # Path and range of each request
        self.stopped = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        content, byte_range = self.server.files.get(self.path), self.headers.get("Range", "")
        self.server.requests.append((self.path, byte_range))
        start = int(re.findall(r"bytes=(\d+)-", byte_range)[0]) if byte_range else 0
        if content is None or (start and start >= len(content)):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if byte_range else 200)
        if byte_range:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.path != self.server.interrupted:
            self.wfile.write(content[start:])
            return
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        partial = self.server.partial_file
        while not (partial.exists() and partial.stat().st_size == len(content) // 2):
            if self.server.stopped.wait(0.01):
                return
        _thread.interrupt_main()
        self.server.stopped.wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("http_proxy", raising=False)
    # A background job of a shell ignores SIGINT.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.stopped.set()
        server.shutdown()
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def set_download(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    # Replaces [download] of NCF
    def replace(*files: dict[str, Any], **fields: Any) -> None:
        choice = catalogue.choose("ncf")
        content = {"files": [{"source": "this test", **file} for file in files], **fields}
        benchmark = choice.benchmark.model_copy(update={"download": catalogue.Download.model_validate(content)})
        replaced = catalogue.Choice(benchmark, choice.implementation_name)
        monkeypatch.setattr(catalogue, "choose", lambda name: replaced)

    return replace


def get(folder: Path, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["data", "get", "ncf", str(folder), *words])
    assert result.exit_code == code, f"{result.output}{result.exception}"
    return result


def error_of(folder: Path, *words: str, code: ExitCode = ExitCode.REFUSED) -> EncoreError:
    error = get(folder, *words, code=1).exception
    assert isinstance(error, EncoreError) and error.exit_code is code and error.hint, error
    return error


@pytest.mark.parametrize("tool", download.TOOLS)
def test_interrupted_download_resumes_and_complete_files_are_skipped(
    server: Server, set_download: Callable[..., None], tmp_path: Path, tool: str
) -> None:
    folder = tmp_path / "raw"
    server.files = {"/a.bin": TEXT, "/day_0.gz": gzip.compress(b"0"), "/day_1.gz": gzip.compress(b"1")}
    set_download(
        {"url": f"{server.url}/a.bin", "md5": MD5, "bytes": len(TEXT)},
        {"url": f"{server.url}/day_{{number}}.gz", "count": 2, "bytes": 42, "unpacked_bytes": 2},
        prepare=["DIR/a.bin"],
    )
    server.interrupted, server.partial_file = "/a.bin", folder / "a.bin.part"
    error_of(folder, "--run", "--with", tool, code=ExitCode.INTERRUPTED)
    assert not (folder / "a.bin").exists()
    states = [file["state"] for file in json.loads(get(folder, "--json").stdout)["files"]]
    assert states == ["started", "missing", "missing"]
    server.interrupted = ""
    output = get(folder, "--run", "--with", tool).stdout
    assert ("/a.bin", f"bytes={len(TEXT) // 2}-") in server.requests
    assert (folder / "a.bin").read_bytes() == TEXT
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "day_0", "day_1"]
    assert f"next: encore data prepare ncf {folder}/a.bin" in output
    requests = len(server.requests)
    get(folder, "--run", "--with", tool)
    assert len(server.requests) == requests
    # Interrupted between the last byte and the renaming: the server answers that the range is empty.
    (folder / "a.bin").rename(folder / "a.bin.part")
    get(folder, "--run", "--with", tool)
    assert (folder / "a.bin").read_bytes() == TEXT


ZEROS = "0" * 32
FAILURES = {
    # Entry of [download], list of MLCommons and folder in it, exit code, message
    "checksum": (
        {"url": "URL/a.bin", "sha256": 2 * ZEROS},
        ("", ""),
        ExitCode.REFUSED,
        f"a.bin.part has sha256 {hashlib.sha256(TEXT).hexdigest()}\n  expected: {2 * ZEROS} (this test)\n  hint: rm ",
    ),
    "disk": (
        {"url": "URL/a.bin", "bytes": 10**18},
        ("", ""),
        ExitCode.REFUSED,
        "2,000,000,000.0 GB: 1,000,000,000.0 GB to download, 1,000,000,000.0 GB prepared",
    ),
    "missing": ({"url": "URL/gone.bin"}, ("", ""), ExitCode.FAILED, "404"),
    "parent": (
        {"r2": "URL/s.uri", "file": "data"},
        (f"{ZEROS}  ../../a.bin", "URL/set"),
        ExitCode.REFUSED,
        "line 1 of ",
    ),
    "root": ({"r2": "URL/s.uri", "file": "data"}, (f"{ZEROS}  /etc/a.bin", "URL/set"), ExitCode.REFUSED, "line 1 of"),
    "page": ({"r2": "URL/s.uri", "file": "data"}, ("<html>", "URL/set"), ExitCode.REFUSED, "line 1 of its list"),
    "server": (
        {"r2": "URL/s.uri", "file": "data"},
        (f"{ZEROS}  a", "http://127.0.0.2/set"),
        ExitCode.REFUSED,
        "names 'http://127.0.0.2/set'",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failed_download_leaves_no_file(
    server: Server, set_download: Callable[..., None], tmp_path: Path, name: str
) -> None:
    entry, (listing, folder), code, message = FAILURES[name]
    texts = {"/s.md5": listing, "/s.uri": folder.replace("URL", server.url)}
    server.files = {"/a.bin": TEXT, **{path: text.encode() for path, text in texts.items()}}
    set_download(
        json.loads(json.dumps(entry).replace("URL", server.url)), prepared_bytes=10**18 if name == "disk" else 0
    )
    error = error_of(tmp_path / "raw", "--run", "--with", "wget", "-o", str(tmp_path / "out"), code=code)
    assert message in str(error)
    assert list(tmp_path.rglob("a.bin")) == [] and (name != "disk" or not server.requests)


def test_existing_file_with_a_wrong_checksum_is_refused(set_download: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"a file of the user")
    set_download({"url": "http://127.0.0.1/a.bin", "md5": MD5})
    assert "a.bin has md5" in error_of(tmp_path, "--run").found


def test_mlcommons_files_are_downloaded_by_their_list(
    server: Server, set_download: Callable[..., None], tmp_path: Path
) -> None:
    uri = f"{server.url}/metadata/set.uri"
    server.files = {
        "/metadata/set.uri": f"{server.url}/sets/set\n".encode(),
        "/metadata/set.md5": f"{MD5}  ./part 0.bin\n{hashlib.md5(b'x').hexdigest()}  below/part-1.bin\n".encode(),
        "/sets/set/part%200.bin": TEXT,
        "/sets/set/below/part-1.bin": b"x",
    }
    set_download({"r2": uri, "file": "data"}, prepare=["DIR/data", "--name", "DIR/**/part-1.bin"])
    plan = get(tmp_path).stdout
    assert f"bash <(curl -s {download.R2_SCRIPT}) -d {tmp_path}/data {uri}" in plan and "**/part-1.bin" in plan
    assert not server.requests
    assert f"--name {tmp_path}/data/below/part-1.bin" in get(tmp_path, "--run").stdout
    assert (tmp_path / "data" / "part 0.bin").read_bytes() == TEXT


def test_file_that_needs_a_login_is_named_and_checked(set_download: Callable[..., None], tmp_path: Path) -> None:
    page = "https://example.org/login"
    set_download({"login": page, "file": "a.tar", "md5": MD5}, terms="an account")
    error = error_of(tmp_path, "--run")
    assert "a.tar: not there" in error.found and page in error.hint and error.expected == "an account"
    (tmp_path / "a.tar").write_bytes(TEXT[:-1])
    assert "a.tar has md5" in error_of(tmp_path, "--run").found
    (tmp_path / "a.tar").write_bytes(TEXT)
    get(tmp_path, "--run")


def test_download_and_preparation_in_one_command(
    server: Server, set_download: Callable[..., None], tmp_path: Path, pytorch_python: Path
) -> None:
    lines = [f"{user},{item},5,{item}" for user in range(20) for item in range(user % 3, 12, 2)]
    server.files = {"/ratings.csv": "\n".join(["userId,movieId,rating,timestamp", *lines]).encode()}
    set_download({"url": f"{server.url}/ratings.csv"}, prepare=["DIR/ratings.csv", "--name", "mine"])
    command = ("--prepare", "-o", str(tmp_path / "out"))
    get(tmp_path / "raw", *command, "--dry-run")
    assert not server.requests
    assert f"{tmp_path / 'out'}: mine, " in get(tmp_path / "raw", *command).stdout


def test_sources_of_all_benchmarks() -> None:
    files: dict[str, dict[str, catalogue.RawFile]] = {}
    for name, benchmark in catalogue.benchmarks().items():
        plan = download.plan(benchmark, Path("raw"), Path("out"))
        assert plan.fetches and plan.next()[:4] == ["encore", "data", "prepare", name]
        assert all(fetch.source for fetch in plan.fetches)
        files[name] = {file.file or file.place[1].rpartition("/")[2]: file for file in benchmark.download.files}
    for name, corpus in (("gnmt", "wmt16"), ("transformer", "wmt17")):
        assert all(set(files[name]) & set(part.archives) for part in (*wmt.CORPORA[corpus], wmt.DEV))
    checksums = published.known()["squad-v1.1"]["checksums"]
    assert [files["bert-squad"][f"{part}-v1.1.json"].sha256 for part in ("train", "dev")] == list(checksums.values())


def test_missing_downloader_is_reported(
    monkeypatch: pytest.MonkeyPatch, set_download: Callable[..., None], tmp_path: Path
) -> None:
    set_download({"url": "http://127.0.0.1:9/a"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert error_of(tmp_path, "--run").found == "no wget or curl on this machine"
