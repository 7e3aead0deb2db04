"""``encore data get``: real downloaders against a server of this machine."""

import _thread
import gzip
import hashlib
import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
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


class Server(ThreadingHTTPServer):
    """Serves ``files`` with ranges; of ``interrupted`` it sends a half, then interrupts this process."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.interrupted = ""
        self.written = Path()  # Where the half comes to
        self.asked: list[tuple[str, str]] = []  # Path and range of each request
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        content, wanted = self.server.files.get(self.path), self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        begin = int(re.findall(r"bytes=(\d+)-", wanted)[0]) if wanted else 0
        if content is None or (begin and begin >= len(content)):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.path == self.server.interrupted:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            written = self.server.written
            while not (written.exists() and written.stat().st_size == len(content) // 2):
                if self.server.ended.wait(0.01):
                    return
            _thread.interrupt_main()
            self.server.ended.wait()
        else:
            self.wfile.write(content[begin:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("http_proxy", raising=False)
    # A shell starts what is in its background without one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.ended.set()
        made.shutdown()
    signal.signal(signal.SIGINT, before)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a [download] in the place of NCF's."""

    def put(*files: dict[str, Any], **more: Any) -> None:
        files_ = [{"source": "this test", **file} for file in files]
        choice = catalogue.choose("ncf")
        made = catalogue.Download.model_validate({"files": files_, **more})
        benchmark = choice.benchmark.model_copy(update={"download": made})
        replaced = catalogue.Choice(benchmark, choice.implementation_name)
        monkeypatch.setattr(catalogue, "choose", lambda name: replaced)

    return put


def get(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["data", "get", "ncf", str(folder), *words])


def refused(folder: Path, *words: str, code: ExitCode = ExitCode.REFUSED) -> EncoreError:
    done = get(folder, *words)
    assert isinstance(done.exception, EncoreError), done.output
    assert done.exception.exit_code is code and done.exception.hint
    return done.exception


@pytest.mark.parametrize("tool", download.TOOLS)
def test_an_interrupted_download_resumes_and_what_is_whole_is_not_asked_for_again(
    server: Server, known: Any, tmp_path: Path, tool: str
) -> None:
    folder = tmp_path / "raw"
    server.files = {"/a.bin": TEXT, "/day_0.gz": gzip.compress(b"0"), "/day_1.gz": gzip.compress(b"1")}
    known(
        {"url": f"{server.url}/a.bin", "md5": md5(TEXT), "bytes": len(TEXT)},
        {"url": f"{server.url}/day_{{number}}.gz", "count": 2, "bytes": 42, "unpacked_bytes": 2},
        prepare=["DIR/a.bin"],
    )
    server.interrupted, server.written = "/a.bin", folder / "a.bin.part"
    refused(folder, "--run", "--with", tool, code=ExitCode.INTERRUPTED)
    half = (folder / "a.bin.part").stat().st_size
    assert half == len(TEXT) // 2 and not (folder / "a.bin").exists()
    assert [each["state"] for each in json.loads(get(folder, "--json").stdout)["files"]] == [
        "started",
        *["missing"] * 2,
    ]
    server.interrupted = ""
    done = get(folder, "--run", "--with", tool)
    assert done.exit_code == 0, done.output
    assert ("/a.bin", f"bytes={half}-") in server.asked
    assert (folder / "a.bin").read_bytes() == TEXT
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "day_0", "day_1"]
    assert f"next: encore data prepare ncf {folder}/a.bin" in done.stdout
    before = len(server.asked)
    assert get(folder, "--run", "--with", tool).exit_code == 0
    assert len(server.asked) == before
    # Whole, but interrupted before it got its name: the server has nothing more to send.
    (folder / "a.bin").rename(folder / "a.bin.part")
    assert get(folder, "--run", "--with", tool).exit_code == 0
    assert (folder / "a.bin").read_bytes() == TEXT


def test_a_wrong_checksum_is_refused_and_never_gets_the_name(server: Server, known: Any, tmp_path: Path) -> None:
    server.files = {"/a.bin": TEXT}
    known({"url": f"{server.url}/a.bin", "sha256": "0" * 64})
    error = refused(tmp_path, "--run")
    assert f"{tmp_path}/a.bin.part has sha256 {hashlib.sha256(TEXT).hexdigest()}" in error.found
    assert "0" * 64 in error.expected and "this test" in error.expected
    assert not (tmp_path / "a.bin").exists()
    (tmp_path / "a.bin").write_bytes(b"of the user's")
    assert "a.bin has sha256" in refused(tmp_path, "--run").found


def test_too_little_room_is_refused_before_anything_is_asked_for(server: Server, known: Any, tmp_path: Path) -> None:
    known({"url": f"{server.url}/a.bin", "bytes": 10**18}, prepared_bytes=10**18)
    error = refused(tmp_path / "raw", "--run", "-o", str(tmp_path / "out"))
    assert "2,000,000,000.0 GB: 1,000,000,000.0 GB to download" in error.expected
    assert not server.asked and not (tmp_path / "raw").exists()


def test_a_file_that_the_server_lacks_is_reported_with_the_downloaders_words(
    server: Server, known: Any, tmp_path: Path
) -> None:
    known({"url": f"{server.url}/gone.bin"})
    error = refused(tmp_path, "--run", "--with", "wget", code=ExitCode.FAILED)
    assert "wget of http://127.0.0.1" in error.found and "404" in error.found


def test_mlcommons_files_come_by_their_list(server: Server, known: Any, tmp_path: Path) -> None:
    uri = f"{server.url}/metadata/set.uri"
    listing = f"{md5(TEXT)}  ./part 0.bin\n{md5(b'x')}  below/part-1.bin\n"
    server.files = {
        "/metadata/set.uri": f"{server.url}/sets/set\n".encode(),
        "/metadata/set.md5": listing.encode(),
        "/sets/set/part%200.bin": TEXT,
        "/sets/set/below/part-1.bin": b"x",
    }
    known({"r2": uri, "file": "data"}, prepare=["DIR/data", "--name", "DIR/**/part-1.bin"])
    printed = get(tmp_path).stdout
    assert f"bash <(curl -s {download.R2_SCRIPT}) -d {tmp_path}/data {uri}" in printed
    assert not server.asked and "**/part-1.bin" in printed
    done = get(tmp_path, "--run")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "data" / "part 0.bin").read_bytes() == TEXT
    assert f"--name {tmp_path}/data/below/part-1.bin" in done.stdout


@pytest.mark.parametrize(
    ("base", "listing", "found"),
    [
        ("{url}/set", f"{'0' * 32}  ../../outside", "line 1 of its list"),
        ("{url}/set", f"{'0' * 32}  /etc/outside", "line 1 of its list"),
        ("{url}/set", "<html>", "line 1 of its list"),
        ("http://127.0.0.2/set", f"{'0' * 32}  a", "names 'http://127.0.0.2/set'"),
    ],
)
def test_what_a_list_may_not_name(
    server: Server, known: Any, tmp_path: Path, base: str, listing: str, found: str
) -> None:
    server.files = {"/m/s.uri": base.format(url=server.url).encode(), "/m/s.md5": listing.encode()}
    known({"r2": f"{server.url}/m/s.uri", "file": "data"})
    assert found in refused(tmp_path / "raw", "--run").found
    assert list(tmp_path.rglob("outside")) == []


def test_what_is_behind_a_login_is_named_and_checked(known: Any, tmp_path: Path) -> None:
    page = "https://example.org/login"
    known({"login": page, "file": "a.tar", "md5": md5(TEXT)}, terms="an account")
    error = refused(tmp_path, "--run")
    assert "a.tar: not there" in error.found and page in error.hint and error.expected == "an account"
    (tmp_path / "a.tar").write_bytes(TEXT[:-1])
    assert "a.tar has md5" in refused(tmp_path, "--run").found
    (tmp_path / "a.tar").write_bytes(TEXT)
    assert get(tmp_path, "--run").exit_code == 0


def test_it_ends_in_a_prepared_data_set(server: Server, known: Any, tmp_path: Path, pytorch_python: Path) -> None:
    lines = [f"{user},{item},5,{item}" for user in range(20) for item in range(user % 3, 12, 2)]
    server.files = {"/ratings.csv": "\n".join(["userId,movieId,rating,timestamp", *lines]).encode()}
    known({"url": f"{server.url}/ratings.csv"}, prepare=["DIR/ratings.csv", "--name", "mine"])
    out = tmp_path / "out"
    done = get(tmp_path / "raw", "--prepare", "-o", str(out), "--dry-run")
    assert done.exit_code == 0 and not server.asked
    done = get(tmp_path / "raw", "--prepare", "-o", str(out))
    assert done.exit_code == 0, done.output
    assert f"{out}: mine, " in done.stdout and (out / "dataset.json").exists()


def test_every_benchmark_says_where_its_data_come_from() -> None:
    for name, benchmark in catalogue.benchmarks().items():
        plan = download.plan(benchmark, Path("raw"), Path("out"))
        assert plan.fetches and plan.next()[:4] == ["encore", "data", "prepare", name]
        assert all(fetch.source for fetch in plan.fetches)
    of = {
        name: {file.place[1].rpartition("/")[2]: file for file in benchmark.download.files}
        for name, benchmark in catalogue.benchmarks().items()
    }
    for name, corpus in (("gnmt", "wmt16"), ("transformer", "wmt17")):
        names = {file.file or last for last, file in of[name].items()}
        assert all(names & set(each.archives) for each in (*wmt.CORPORA[corpus], wmt.DEV))
    squad = published.known()["squad-v1.1"]["checksums"]
    assert [of["bert-squad"][f"{part}-v1.1.json"].sha256 for part in ("train", "dev")] == list(squad.values())


def test_no_downloader(monkeypatch: pytest.MonkeyPatch, known: Any, tmp_path: Path) -> None:
    known({"url": "http://127.0.0.1:9/a"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert refused(tmp_path, "--run").found == "no wget or curl on this machine"
