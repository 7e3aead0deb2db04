"""`encore data`: real downloaders with a server on this machine; preparing, verifying and listing."""

import _thread
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import pytest

from benchmarks.common.data import manifest, published
from benchmarks.translation import wmt
from encore import catalogue, data, download, environment, hub, paths
from encore.containers import runtimes
from encore.containers.engines import Engine
from encore.errors import EncoreError, ExitCode
from tests.command_line import error_of, output_of, run_encore
from tests.results.result_logs import write_files
from tests.trainings import wait_until


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    # A prepared data set that SSD and Mask R-CNN read
    folder = write_files(tmp_path / "scenes", {"train.rec": bytes(12), "val.rec": bytes(3)})
    splits = {
        name: {
            "count": size // 3, "unlisted_bytes": 1000,
            "files": [{"name": f"{name}.rec", "bytes": size, "sha256": "0" * 64}],
        }
        for name, size in (("train", 12), ("val", 3))
    }  # fmt: skip
    content = {"benchmark": "ssd", "name": "scenes", "classes": ["a", "b"], "splits": splits, "facts": {}, "how": {}}
    manifest.write({**content, "shared_with": ["ssd", "maskrcnn"]}, folder)
    return folder


def test_prepare_then_verify_by_the_command_line(mxnet_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    steps = [
        (("prepare", "resnet", "-o", folder), 0, "digits, 1,500 train, 297 val, 10 classes"),
        (("prepare", "resnet", "-o", folder), 0, "nothing to do"),
        (("verify", "resnet", folder, "--quick"), 0, ": complete ("),
        (("verify", "resnet", folder), 0, ": complete ("),
        (("verify", "resnet", folder, "--json"), 0, '"whole": true'),
        (("verify", "resnet", folder), 2, "val.rec has 0 bytes"),
        (("verify", "resnet", tmp_path / "none", "--json"), 2, '"found": "no folder'),
    ]
    for words, code, text in steps:
        if code:
            (folder / "val.rec").write_bytes(b"")
        result = run_encore("data", *words)
        assert (result.exit_code, text in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (
            "resnet 'raw images' --resize 480 --quality 95 --workers 4 --skip-corrupt",
            "benchmarks.resnet.prepare HERE/'raw images' -o HERE/out --workers 4 --resize 480 --quality 95 "
            "--skip-corrupt",
        ),
        (
            "dlrm --index-limit 9 --frequency-threshold 3 --name clicks --seed 5 --overwrite",
            "benchmarks.dlrm.prepare -o HERE/out --name clicks --seed 5 --overwrite --index-limit 9 "
            "--frequency-threshold 3",
        ),
        # The preparation runs in the project's root: a relative path of the caller becomes absolute if it exists.
        (
            "bert raw --vocabulary vocab.txt --evaluation later",
            "benchmarks.bert.prepare HERE/raw -o HERE/out --vocabulary HERE/vocab.txt --evaluation later",
        ),
    ],
)
def test_dry_run_prints_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, arguments: str
) -> None:
    monkeypatch.chdir(write_files(tmp_path, {"vocab.txt": "[PAD]"}))
    output = output_of("data", "prepare", *shlex.split(words), "-o", "out", "--dry-run")
    assert shlex.split(output) == shlex.split(f"python -m {arguments}".replace("HERE", str(tmp_path)))
    assert not (tmp_path / "out").exists()


def test_paths_in_options_are_mounted_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_files(tmp_path, {"vocab.txt": "", "480": ""}))
    preparation = data.Preparation(source=Path("raw"), options=("--vocabulary", "vocab.txt", "--length", "480"))
    target = replace(runtimes.ON_HOST, runtime="docker", image="bert", engine=Engine(name="docker", program="docker"))
    argv = runtimes.preparation(target, "bert", tmp_path / "out", preparation).argv
    mounts = [word for word in argv if re.search(rf"source={tmp_path}/(vocab.txt|480)", word)]
    assert mounts == [f"type=bind,source={tmp_path}/vocab.txt,target={tmp_path}/vocab.txt,readonly"]


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [("resnet", ["--resize"]), ("resnet-tensorflow", ["--resize"]), ("dlrm", ["--index-limit"]), ("ncf", [])],
)
def test_help_lists_the_options_of_the_benchmark(benchmark: str, options: list[str]) -> None:
    output = output_of("data", "prepare", benchmark, "--help")
    assert {*re.findall("--resize|--index-limit|--overwrite", output)} == {*options, "--overwrite"}


def test_verify_lists_all_data_sets(scenes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A data set is listed under every benchmark that reads it. A missing one is no damage
    monkeypatch.setattr(paths, "default_data", lambda benchmark: tmp_path / benchmark)
    scenes.rename(tmp_path / "ssd")
    lines = output_of("data", "verify").splitlines()
    ready = f"{tmp_path / 'ssd'}: ready: scenes, 4 train, 1 val, 2 classes, 2.0 kB, id "
    assert [line[:12].strip() for line in lines if ready in line] == ["maskrcnn", "ssd"]
    assert f"ncf         no data set in {tmp_path / 'ncf'}: no such folder" in lines
    write_files(tmp_path, {"ssd/dataset.json": {}})
    assert [run_encore("data", "verify", *form).exit_code for form in ([], ["--json"])] == [ExitCode.REFUSED] * 2


ERROR = '{"error": {"found": "f", "expected": "", "hint": "r"}}'


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("import sys; sys.exit('the last line')", ExitCode.FAILED, "ended with exit code 1:\n    the last line"),
        ("import os; os.kill(os.getpid(), 9)", ExitCode.FAILED, "ended with signal 9"),
        (f"print({ERROR!r}); raise SystemExit(130)", ExitCode.INTERRUPTED, "f"),
        (f"print({ERROR!r}); raise SystemExit(2)", ExitCode.REFUSED, "f"),
    ],
)
def test_failure_of_the_preparation_is_reported(program: str, code: ExitCode, message: str) -> None:
    problems = data.follow([sys.executable, "-c", program], lambda update: None)
    assert [(problem.exit_code, problem.found[-len(message) :]) for problem in problems] == [(code, message)]


def test_progress_is_passed_on() -> None:
    updates: list[data.Update] = []
    program = 'print(\'{"phase": "join", "done": 3, "total": 4, "unit": "games"}\\n{"note": "n"}\\ntext\')'
    join = data.Update(phase="join", done=3, total=4, unit="games")
    assert data.follow([sys.executable, "-c", program], updates.append) == []
    assert updates == [join, data.Update(note="n"), data.Update(note="text")]


def test_interrupt_stops_the_preparation(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        # The interrupt may arrive as soon as the line is printed, so the line is inside the try block.
        'try:\n    print(\'{"note": "started"}\', flush=True)\n    time.sleep(600)\n'
        f"except KeyboardInterrupt:\n    pathlib.Path({str(tmp_path / 'stopped')!r}).touch()\n"
    )
    with pytest.raises(EncoreError, match="interrupted") as caught:
        data.follow([sys.executable, "-c", program], Mock(side_effect=KeyboardInterrupt))
    assert (caught.value.exit_code, (tmp_path / "stopped").exists()) == (ExitCode.INTERRUPTED, True)


def test_python_option_prepares_and_verifies(tmp_path: Path, pytorch_python: Path) -> None:
    for words in (("prepare", "ncf", "-o", tmp_path / "d"), ("verify", "ncf", tmp_path / "d")):
        output_of("data", *words, "--python", pytorch_python)


def test_missing_python_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EncoreError, match="does not start"):
        data.prepare("resnet", tmp_path, data.Preparation(), tmp_path / "python")


# -- the check before a run -----------------------------------------------------------------------------


def test_complete_data_set_passes(scenes: Path) -> None:
    content = data.check_data(scenes, "maskrcnn")
    values = (content.name, content.classes, content.counts, content.bytes, content.files, len(content.id))
    assert values == ("scenes", 2, {"train": 4, "val": 1}, 2015, {"train.rec": 12, "val.rec": 3}, 64)


def edit(folder: Path, **changes: Any) -> None:
    write_files(folder, {"dataset.json": {**json.loads((folder / "dataset.json").read_text("utf-8")), **changes}})


DAMAGES = {
    "missing": (shutil.rmtree, "no such folder"),
    "incomplete": (lambda folder: (folder / "dataset.json").rename(folder / "parts"), "is incomplete"),
    "no manifest": (lambda folder: (folder / "dataset.json").unlink(), "contains no prepared data set"),
    "damaged": (lambda folder: (folder / "dataset.json").write_text("{"), "is damaged"),
    "fields": (lambda folder: edit(folder, splits=[1]), "is damaged"),
    "schema": (lambda folder: edit(folder, schema=7), "has schema 7"),
    "other": (lambda folder: edit(folder, benchmark="ncf", shared_with=[]), "contains the data set scenes of ncf"),
    "short": (lambda folder: (folder / "val.rec").write_bytes(b"1"), "has changed: 1 bytes"),
    "gone": (lambda folder: (folder / "train.rec").unlink(), "train.rec: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_set_is_refused(scenes: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(scenes)
    with pytest.raises(EncoreError, match=message) as caught:
        data.check_data(scenes, "ssd")
    assert caught.value.hint and "BENCHMARK" not in caught.value.hint


TEXT = bytes(range(256)) * 4096
MD5 = hashlib.md5(TEXT).hexdigest()
COMMIT = "0123456789" * 4  # Of a repository of the Hugging Face Hub
TREE = f"/api/models/own/er/tree/{COMMIT}?recursive=true"


class Handler(BaseHTTPRequestHandler):
    """Serves ``files`` with ranges; sends half of the file ``interrupted``, then interrupts this process."""

    log_message = Mock()

    def do_GET(self) -> None:
        # The Hub's client sends another parameter.
        path = self.path.removesuffix("&expand=false")
        content, byte_range = self.server.files.get(path), self.headers.get("Range", "")
        self.server.requests.append((self.path, byte_range))
        start = int(byte_range.removeprefix("bytes=").rstrip("-") or 0)
        is_denied = "/resolve/" in path and self.server.token not in self.headers.get("Authorization", "")
        if is_denied or content is None or (start and start >= len(content)):
            self.send_error(401 if is_denied else 404 if content is None else 416)
            return
        is_interrupted = self.path == self.server.interrupted
        self.send_response(206 if byte_range else 200)
        for name, value in {
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}",
            "Content-Length": str(len(content) - start),
            "ETag": hashlib.sha256(content).hexdigest(),
            "X-Repo-Commit": COMMIT,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : len(content) // 2 if is_interrupted else None])
            self.wfile.flush()
        if is_interrupted:
            partial = self.server.partial_file
            wait_until(lambda: partial.exists() and partial.stat().st_size == len(content) // 2, "half is written")
            _thread.interrupt_main()
            self.server.stopped.wait()

    do_HEAD = do_GET


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("http_proxy", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # A token is required for files of a repository, if it is set
        vars(server).update(
            url=f"http://127.0.0.1:{server.server_port}", daemon_threads=True, stopped=threading.Event(),
            files={}, requests=[], interrupted="", partial_file=None, token="",
        )  # fmt: skip
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.stopped.set()
        server.shutdown()


@pytest.fixture
def set_download(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    # Replaces [download] of NCF
    monkeypatch.setenv("HF_HOME", "/none")  # No token of this user
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def replace(*files: dict[str, Any], **fields: Any) -> None:
        content = {"files": [{"source": "this test", **file} for file in files], **fields}
        update = {"download": catalogue.Download.model_validate(content)}
        replaced = catalogue.Choice(NCF.benchmark.model_copy(update=update), NCF.implementation_name)
        monkeypatch.setattr(catalogue, "choose", lambda name: replaced)

    return replace


NCF = catalogue.choose("ncf")
GET = ("data", "get", "ncf")


@pytest.mark.parametrize("tool", download.TOOLS)
def test_interrupted_download_resumes_and_complete_files_are_skipped(
    server: Any, set_download: Callable[..., None], tmp_path: Path, tool: str
) -> None:
    folder = tmp_path / "raw"
    server.files = {"/a.bin": TEXT, "/day_0.gz": gzip.compress(b"0"), "/day_1.gz": gzip.compress(b"1")}
    set_download(
        {"url": f"{server.url}/a.bin", "md5": MD5, "bytes": len(TEXT)},
        {"url": f"{server.url}/day_{{number}}.gz", "count": 2, "bytes": 42, "unpacked_bytes": 2},
        prepare=["DIR/a.bin"],
    )
    server.interrupted, server.partial_file = "/a.bin", folder / "a.bin.part"
    command = (*GET, folder, "--run", "--with", tool)
    error_of(*command, code=ExitCode.INTERRUPTED)
    states = [file["state"] for file in json.loads(output_of(*GET, folder, "--json"))["files"]]
    assert states == ["started", "missing", "missing"]
    server.interrupted = ""
    assert f"next: encore data prepare ncf {folder}/a.bin" in output_of(*command)
    assert ("/a.bin", f"bytes={len(TEXT) // 2}-") in server.requests
    requests = len(server.requests)
    output_of(*command)
    assert len(server.requests) == requests
    # Interrupted between the last byte and the renaming: the server answers that the range is empty.
    (folder / "a.bin").rename(folder / "a.bin.part")
    output_of(*command)
    expected = {"a.bin": TEXT, "day_0": b"0", "day_1": b"1"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


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
    server: Any, set_download: Callable[..., None], tmp_path: Path, name: str
) -> None:
    entry, (listing, folder), code, message = FAILURES[name]
    texts = {"/s.md5": listing, "/s.uri": folder.replace("URL", server.url)}
    server.files = {"/a.bin": TEXT, **{path: text.encode() for path, text in texts.items()}}
    set_download(
        json.loads(json.dumps(entry).replace("URL", server.url)), prepared_bytes=10**18 if name == "disk" else 0
    )
    error = error_of(*GET, tmp_path / "raw", "--run", "--with", "wget", "-o", tmp_path / "out", code=code)
    assert (message in str(error), [*tmp_path.rglob("a.bin")]) == (True, [])
    assert name != "disk" or not server.requests


def test_mlcommons_files_are_downloaded_by_their_list(
    server: Any, set_download: Callable[..., None], tmp_path: Path
) -> None:
    uri = f"{server.url}/metadata/set.uri"
    server.files = {
        "/metadata/set.uri": f"{server.url}/sets/set\n".encode(),
        "/metadata/set.md5": f"{MD5}  ./part 0.bin\n{hashlib.md5(b'x').hexdigest()}  below/part-1.bin\n".encode(),
        "/sets/set/part%200.bin": TEXT,
        "/sets/set/below/part-1.bin": b"x",
    }
    set_download({"r2": uri, "file": "data"}, prepare=["DIR/data", "--name", "DIR/**/part-1.bin"])
    plan = output_of(*GET, tmp_path)
    assert f"bash <(curl -s {download.R2_SCRIPT}) -d {tmp_path}/data {uri}" in plan and "**/part-1.bin" in plan
    assert not server.requests
    assert f"--name {tmp_path}/data/below/part-1.bin" in output_of(*GET, tmp_path, "--run")
    assert (tmp_path / "data" / "part 0.bin").read_bytes() == TEXT


WEIGHTS = {"config.json": b"{}", "a shard.safetensors": TEXT, "README.md": b"not selected"}
COMBINED = hashlib.md5("".join(sorted((MD5, hashlib.md5(b"{}").hexdigest()))).encode()).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def repository(server: Any, set_download: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    # A repository of the Hub: the answers of its tree and file addresses
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    lfs = {"oid": hashlib.sha256(TEXT).hexdigest(), "size": len(TEXT), "pointerSize": 130}
    entries = [
        {"type": "directory", "path": "data", "size": 0, "oid": COMMIT},
        *(
            {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
            | ({"lfs": lfs} if content is TEXT else {})
            for path, content in WEIGHTS.items()
        ),
    ]
    server.files = {f"/own/er/resolve/{COMMIT}/{quote(path)}": content for path, content in WEIGHTS.items()}
    server.files[TREE] = json.dumps(entries).encode()

    def set_hub(**fields: Any) -> None:
        include = ["*.safetensors", "*.json"]
        hub = {"repository": "own/er", "revision": COMMIT, "include": include, "combined_md5": COMBINED, **fields}
        set_download({"hub": hub, "file": "base"}, prepare=["DIR/base"])

    return set_hub


@pytest.mark.parametrize("tool", download.TOOLS)
def test_files_of_the_hub_resume_and_are_verified(
    server: Any, repository: Callable[..., None], tmp_path: Path, tool: str
) -> None:
    repository()
    folder, shard = tmp_path / "base", f"/own/er/resolve/{COMMIT}/a%20shard.safetensors"
    plan = output_of(*GET, tmp_path)
    assert f"hf download own/er --repo-type model --revision {COMMIT} --include '*.safetensors' --include" in plan
    assert f"combined MD5 {COMBINED}" in plan and not server.requests
    server.interrupted, server.partial_file = shard, folder / "a shard.safetensors.part"
    error_of(*GET, tmp_path, "--run", "--with", tool, code=ExitCode.INTERRUPTED)
    assert not (folder / "hub.json").exists()
    server.interrupted = ""
    output_of(*GET, tmp_path, "--run", "--with", tool)
    assert (shard, f"bytes={len(TEXT) // 2}-") in server.requests
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["a shard.safetensors", "config.json", "hub.json"]
    digest = {"name": "a shard.safetensors", "bytes": len(TEXT), "sha256": hashlib.sha256(TEXT).hexdigest()}
    revision, files = hub.read_manifest(folder)
    assert (revision, files[digest["name"]], (folder / digest["name"]).read_bytes()) == (COMMIT, digest, TEXT)
    (folder / "config.json").write_bytes(b"[]")
    assert f"config.json has git-sha1 {git_sha1(b'[]')}" in error_of(*GET, tmp_path, "--run").found


HUB_FAILURES = {
    # Fields of the repository, answer for its list of files, exit code, message
    "combined": ({"combined_md5": ZEROS}, None, ExitCode.REFUSED, f"base has the combined MD5 {COMBINED}"),
    "no commit": ({"revision": ""}, None, ExitCode.REFUSED, "/own/er/commits/main: --revision COMMIT"),
    "no token": ({"terms": "license"}, None, ExitCode.REFUSED, "denies access to own/er: HF_TOKEN is not set"),
    "gone": ({"revision": "1" * 40}, None, ExitCode.FAILED, "404"),
    "page": ({}, b"<html>", ExitCode.REFUSED, "is not a list of files: "),
    "fields": ({}, b'[{"type": "file", "path": "a"}]', ExitCode.REFUSED, "is not a list of files: Field required"),
    "parent": (
        {},
        json.dumps([{"type": "file", "path": "../a.json", "size": 1, "oid": COMMIT}]).encode(),
        ExitCode.REFUSED,
        "own/er has the path ../a.json",
    ),
    "nothing": ({"include": ["*.bin"]}, None, ExitCode.REFUSED, "own/er has 4 entries, 0 match *.bin"),
    "disk": (
        {},
        json.dumps([{"type": "file", "path": "a.json", "size": 10**18, "oid": COMMIT}]).encode(),
        ExitCode.REFUSED,
        "expected: 1,000,000,000.0 GB",
    ),
}


@pytest.mark.parametrize("name", HUB_FAILURES)
def test_failed_download_from_the_hub_is_explained(
    server: Any, repository: Callable[..., None], tmp_path: Path, name: str
) -> None:
    fields, listing, code, message = HUB_FAILURES[name]
    repository(**fields)
    server.files[TREE] = listing or server.files[TREE]
    error = error_of(*GET, tmp_path, "--run", "--with", "wget", code=code)
    written = [path for path in (tmp_path / "base" / "hub.json", tmp_path / "a.json") if path.exists()]
    assert (message in str(error), written) == (True, []), error


@pytest.mark.parametrize("tool", download.TOOLS)
def test_token_is_sent_by_curl_and_never_shown(
    server: Any, repository: Callable[..., None], tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_secret"
    repository(terms="the license")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    denied = error_of(*GET, tmp_path, "--run", "--with", tool)
    assert (denied.found, denied.expected) == ("the Hub denies access to own/er", "the license")
    # The token of the login
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HOME", str(write_files(tmp_path / "home", {"token": "hf_secret\n"})))
    popen = Mock(wraps=subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", popen)
    output = output_of(*GET, tmp_path, "--run", "--with", tool)
    assert {call.args[0][0] for call in popen.call_args_list} == {"curl"}
    assert "hf_secret" not in f"{popen.call_args_list}{output}"
    monkeypatch.setattr(shutil, "which", lambda name: "wget" if name == "wget" else None)
    assert error_of(*GET, tmp_path, "--run", "--with", "wget").found == "no curl on this machine"


@pytest.mark.slow
def test_client_of_the_hub_downloads_the_same_files(
    server: Any, repository: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client of the tests' environment instead of the locked one
    ensure_environment = Mock(return_value=Path(sys.executable))
    monkeypatch.setattr(environment, "ensure_environment", ensure_environment)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    repository()
    output_of(*GET, tmp_path, "--run", "--with", "hf")
    written = (tmp_path / "base" / "a shard.safetensors").read_bytes(), hub.read_manifest(tmp_path / "base")[0]
    assert (ensure_environment.call_args.args[0], *written) == ("hub", TEXT, COMMIT)


def test_full_disk_is_named(
    server: Any, set_download: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A downloader that fails when the last block is written
    set_download({"url": f"{server.url}/a.bin"})
    script = "#!/bin/sh\necho 'curl: (23) client returned ERROR on write' >&2\nexit 23\n"
    (write_files(tmp_path / "bin", {"curl": script}) / "curl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=SimpleNamespace(free=0)))
    error = error_of(*GET, tmp_path / "raw", "--run", "--with", "curl", code=ExitCode.FAILED)
    assert (error.found, error.hint) == (f"the disk of {tmp_path / 'raw'} is full", data.AGAIN)


def test_variant_replaces_a_source(set_download: Callable[..., None], tmp_path: Path) -> None:
    gated = {"repository": "own/er", "terms": "license"}
    set_download({"url": "http://a/b", "file": "base"}, {"hub": gated, "file": "base", "variant": "f16"})
    for words, text in (
        ("", "alternative: --variant f16: own/er"),
        ("--variant f16", "--revision COMMIT"),
        ("--variant f16", "gated: accept the license at https://huggingface.co/own/er"),
        (f"--variant f16 --revision {COMMIT}", f"--revision {COMMIT}"),
        ("--variant f61", "unknown variant 'f61'"),
        ("--variant f16 --revision main", "--revision main"),
        (f"--revision {COMMIT}", "--revision: all commits are published"),
    ):
        result = run_encore(*GET, tmp_path, *words.split())
        assert text in f"{result.stdout}{result.exception}", words


@pytest.mark.long
def test_parquet_is_prepared_by_the_command_line(hub_python: Path, tmp_path: Path) -> None:
    # pyarrow of the Hub's environment follows the packages of the framework's
    raw = tmp_path / "raw" / "data"
    raw.mkdir(parents=True)
    write_files(raw.parent, {"hub.json": {"repository": "own/er", "revision": COMMIT, "files": []}})
    rows = [list(range(start, start + 16)) for start in range(40)]
    parts = {"train": rows[:30], "validation": rows[30:]}
    program = "import json, sys, pyarrow, pyarrow.parquet as parquet\n" + (
        "for name, rows in json.loads(sys.argv[1]).items():\n"
        "    table = pyarrow.table({'input_ids': rows, 'labels': rows})\n"
        "    parquet.write_table(table, f'{sys.argv[2]}/{name}-00000-of-00001.parquet')"
    )
    subprocess.run([hub_python, "-c", program, json.dumps(parts), raw], check=True)
    output_of("data", "prepare", "llama2-70b-lora", raw, "-o", tmp_path / "out")
    how = json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8"))["how"]
    assert (how["repository"], how["revision"]) == ("own/er", COMMIT)


def test_file_that_needs_a_login_is_named_and_checked(set_download: Callable[..., None], tmp_path: Path) -> None:
    page = "https://example.org/login"
    set_download({"login": page, "file": "a.tar", "md5": MD5}, terms="an account")
    error = error_of(*GET, tmp_path, "--run")
    assert ("a.tar: missing" in error.found, page in error.hint, error.expected) == (True, True, "an account")
    write_files(tmp_path, {"a.tar": TEXT[:-1]})
    assert "a.tar has md5" in error_of(*GET, tmp_path, "--run").found
    output_of(*GET, write_files(tmp_path, {"a.tar": TEXT}), "--run")


def test_download_and_preparation_in_one_command(
    server: Any, set_download: Callable[..., None], tmp_path: Path, pytorch_python: Path
) -> None:
    lines = [f"{user},{item},5,{item}" for user in range(20) for item in range(user % 3, 12, 2)]
    server.files = {"/ratings.csv": "\n".join(["userId,movieId,rating,timestamp", *lines]).encode()}
    set_download({"url": f"{server.url}/ratings.csv"}, prepare=["DIR/ratings.csv", "--name", "mine"])
    command = (*GET, tmp_path / "raw", "--prepare", "-o", tmp_path / "out")
    output_of(*command, "--dry-run")
    assert not server.requests
    assert f"{tmp_path / 'out'}: mine, " in output_of(*command)


def test_sources_of_all_benchmarks() -> None:
    files: dict[str, dict[str, catalogue.RawFile]] = {}
    for name, benchmark in catalogue.benchmarks().items():
        plan = download.plan(benchmark, Path("raw"), Path("out"))
        sources = [fetch.source for fetch in plan.fetches]
        assert (plan.next()[:4], bool(sources) and all(sources)) == (["encore", "data", "prepare", name], True)
        files[name] = {file.file or file.place[1].rpartition("/")[2]: file for file in benchmark.download.files}
    for name, corpus in (("gnmt", "wmt16"), ("transformer", "wmt17")):
        assert all(set(files[name]) & set(part.archives) for part in (*wmt.CORPORA[corpus], wmt.DEV))
    checksums = published.load()["squad-v1.1"]["checksums"]
    assert [files["bert-squad"][f"{part}-v1.1.json"].sha256 for part in ("train", "dev")] == list(checksums.values())


def test_missing_downloader_is_reported(
    monkeypatch: pytest.MonkeyPatch, set_download: Callable[..., None], tmp_path: Path
) -> None:
    set_download({"url": "http://127.0.0.1:9/a"})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert error_of(*GET, tmp_path, "--run").found == "no wget or curl on this machine"
