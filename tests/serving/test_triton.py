"""A real Triton server on this machine: outputs over HTTP and gRPC, bad requests, measurements, failures at start."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encore import paths
from encore.errors import EncoreError
from encore.job import Command
from encore.lab.serving import server
from tests.conftest import Encore
from tests.preparing import write_files
from tests.trainings import free_ports, held_port, served, serving

Example = dict[str, np.ndarray[Any, Any]]
# Runs client.py with a protocol and more options
Send = Callable[..., subprocess.CompletedProcess[str]]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheel of the server is for Linux")


def run(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, cwd=paths.ROOT)
    assert result.returncode == code and "Traceback" not in result.stderr, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def exported(serving_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "with a space" / "tiny"
    folder.parent.mkdir()
    run(serving_python, "-m", "tests.in_framework.tiny_export", folder)
    return folder


@pytest.fixture(scope="module")
def send(exported: Path, serving_python: Path) -> Iterator[Send]:
    with serving(exported) as ports:
        client = (serving_python, exported / "triton" / "client.py", "--protocol")
        yield lambda protocol, *options, code=0: run(
            *client, protocol, "--url", f"127.0.0.1:{ports[protocol]}", *options, code=code
        )


def check(send: Send, protocol: str, folder: Path, code: int = 0) -> dict[str, Any]:
    (model,) = json.loads(send(protocol, "--json", "--folder", folder, code=code).stdout)
    return dict(model)


@pytest.fixture(scope="module")
def example(exported: Path) -> Example:
    with np.load(exported / "example.npz") as arrays:
        return dict(arrays)


def copy_with(exported: Path, folder: Path, types: tuple[str, str] = ("", ""), **arrays: np.ndarray[Any, Any]) -> Path:
    # A copy of the export with other arrays in its example, and the first of one type replaced in its passport
    source = shutil.copytree(exported / "triton", folder, ignore=shutil.ignore_patterns("model_repository", "backends"))
    with np.load(source / "example.npz") as example:
        np.savez(folder / "example.npz", **{**example, **arrays})
    write_files(folder, {"export.json": lambda content: content.replace(*map(str.encode, types), 1)})
    return folder


@on_linux
@pytest.mark.long
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_outputs_are_those_of_the_export(
    send: Send, exported: Path, example: Example, tmp_path: Path, protocol: str
) -> None:
    # 40 samples are two requests: the largest batch has 32
    model = check(send, protocol, exported / "triton")
    assert (model["samples"], model["same"], model["tolerance"]) == (40, True, 1e-5)
    assert max(model["differences"].values()) <= 1e-5
    # Differences are relative to the largest magnitude of the output
    model = check(send, protocol, copy_with(exported, tmp_path / "outputs", sum=example["sum"] * 1.5), code=1)
    assert (model["same"], model["differences"]["sum"]) == (False, pytest.approx(1 / 3, rel=1e-3))
    for message, types, arrays in (
        ("unexpected shape", ("", ""), {"features": example["features"][:, :-1]}),
        ("data-type", ("FP32", "FP64"), {"features": example["features"].astype(np.float64)}),
        ("out of data bounds", ("", ""), {"ids": example["ids"] + 100}),  # fails in the model itself
    ):
        folder = copy_with(exported, tmp_path / message, types, **arrays)
        assert message in send(protocol, "--json", "--folder", folder, code=2).stderr
    assert check(send, protocol, exported / "triton")["same"]


@on_linux
@pytest.mark.long
def test_client_sends_a_file_of_inputs(send: Send, example: Example, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(inputs, features=example["features"][5:8], ids=example["ids"][5:8])
    assert "sum [3]: " in send("http", "--inputs", inputs, "--outputs", outputs).stdout
    with np.load(outputs) as arrays:
        assert [np.allclose(arrays[name], example[name][5:8]) for name in arrays.files] == [True, True]
    np.savez(tmp_path / "half.npz", ids=example["ids"])
    write_files(tmp_path, {"damaged.npz": inputs.read_bytes()[:100]})
    for given, written, message in (
        (tmp_path / "half.npz", outputs, "has no features"),
        *((tmp_path / name, outputs, "is not a file of") for name in ("gone.npz", "damaged.npz")),
        (inputs, tmp_path / "gone" / "outputs.npz", "cannot be written"),
    ):
        assert message in send("http", "--inputs", given, "--outputs", written, code=2).stderr


@on_linux
@pytest.mark.long
def test_measurements_by_batch_and_clients(encore: Encore, exported: Path, tmp_path: Path) -> None:
    grid = ("--batches", "1,64", "--clients", "1,3", "--requests", "12", "-o", str(tmp_path / "triton"))
    cells = served(encore, exported, "--runtime", "host", "--bench", *grid)["bench"]
    # The server takes batches up to 32
    assert [(cell["batch"], cell["clients"]) for cell in cells] == [(1, 1), (1, 3)]
    assert all(cell["ratio"] > 0 and 0 < cell["server"]["p50_ms"] <= cell["server"]["p99_ms"] for cell in cells)


@on_linux
@pytest.mark.long
def test_server_that_cannot_load_the_model_ends(
    encore: Encore, serving_python: Path, exported: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(exported, tmp_path / "broken", ignore=shutil.ignore_patterns("triton"))
    (broken / "model.onnx").write_bytes(b"no model")
    http, grpc = free_ports()
    options = ("--runtime", "host", "--python", str(serving_python), "--http-port", http, "--grpc-port", grpc)
    output = encore("serve", str(broken), *options, "--metrics-port", "0", "--check", code=1)
    assert "the server stopped" in output.stderr and "model.onnx" in output.stderr


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: /models/my: No such file or directory",
        "/models/stub: error while loading shared libraries: libarchive.so.13: cannot open shared object file",
    ],
)
def test_backend_that_does_not_start_is_reported_while_the_server_waits(tmp_path: Path, line: str) -> None:
    noise = 'E1123 12:41:32.821556 26320 server.cc:241] "CudaDriverHelper has not been initialized."'
    argv = ("sh", "-c", 'printf "%s\\n" "$@"; exec sleep 600', "sh", line, noise)
    command = Command(argv=argv, environment=dict(os.environ), working_directory=tmp_path)
    with held_port() as http, held_port() as grpc:
        ports = server.Ports(http.getsockname()[1], grpc.getsockname()[1], 0)
        started = server.running(command, ports, ["tiny"], tmp_path / "server.log", 600)
        with pytest.raises(EncoreError, match="cannot start the backend") as error, started:
            pass
    assert line in error.value.found
