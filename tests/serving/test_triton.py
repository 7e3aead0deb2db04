"""A real Triton server on this machine: its answers over HTTP and gRPC, what it refuses, its figures, its end."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from encore import paths
from encore.errors import EncoreError
from encore.job import Command
from encore.lab.serving import server
from encore.lab.serving.server import Ports
from tests.conftest import Encore
from tests.trainings import Serving, free_ports, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server's wheel is for Linux")


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, cwd=paths.ROOT)


@pytest.fixture(scope="module")
def exported(serving_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "with a space" / "tiny"
    folder.parent.mkdir()
    done = run(serving_python, "-m", "tests.in_framework.tiny_export", folder)
    assert done.returncode == 0, done.stderr
    return folder


@dataclass(frozen=True)
class Served:
    server: Serving
    folder: Path
    python: Path

    def ask(self, protocol: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        url = f"127.0.0.1:{self.server.ports[protocol]}"
        words = ("--url", url, "--protocol", protocol, "--json", "--folder", folder or self.folder)
        return run(self.python, self.folder / "client.py", *words)


@pytest.fixture(scope="module")
def served(exported: Path, serving_python: Path) -> Iterator[Served]:
    with serving(exported) as found:
        yield Served(found, exported / "triton", serving_python)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_evaluation_samples_give_the_same_outputs(served: Served, protocol: str) -> None:
    """40 samples are more than the server's largest batch of 32: the client sends two requests."""
    done = served.ask(protocol)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["samples"], found["same"]) == (40, True)
    assert max(found["differences"].values()) <= found["tolerance"] == 1e-5


def changed_export(served: Served, folder: Path, **arrays: str) -> Path:
    """Copy the example with some arrays changed by an expression over ``a``; the passport says what they are now."""
    shutil.copytree(served.folder, folder, ignore=shutil.ignore_patterns("model_repository", "backends"))
    code = f"""
import json, numpy as np
from pathlib import Path
arrays = dict(np.load("{folder}/example.npz"))
for name, how in {arrays!r}.items():
    arrays[name] = eval(how, {{"a": arrays[name], "np": np}})
np.savez("{folder}/example.npz", **arrays)
passport = json.loads(Path("{folder}/export.json").read_text())
for each in passport["inputs"]:
    each["type"] = {{"float32": "FP32", "float64": "FP64", "int64": "INT64"}}[str(arrays[each["name"]].dtype)]
Path("{folder}/export.json").write_text(json.dumps(passport))
"""
    done = run(served.python, "-c", code)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("how", "said"),
    [("a[:, :-1]", "unexpected shape"), ("a.astype(np.float64)", "data-type")],
    ids=["shape", "type"],
)
def test_wrong_inputs_are_refused_in_a_line(served: Served, tmp_path: Path, protocol: str, how: str, said: str) -> None:
    done = served.ask(protocol, changed_export(served, tmp_path / "changed", features=how))
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_own_inputs_are_sent_and_the_outputs_kept(served: Served, tmp_path: Path) -> None:
    code = f"""
import numpy as np
example = np.load("{served.folder}/example.npz")
np.savez("{tmp_path}/own.npz", features=example["features"][5:8], ids=example["ids"][5:8])
np.savez("{tmp_path}/half.npz", ids=example["ids"])
np.save("{tmp_path}/one.npy", example["ids"])
"""
    assert run(served.python, "-c", code).returncode == 0
    words = (
        served.python,
        served.folder / "client.py",
        "--url",
        f"127.0.0.1:{served.server.ports['http']}",
        "--inputs",
    )
    done = run(*words, tmp_path / "own.npz", "--outputs", tmp_path / "found.npz")
    assert done.returncode == 0, done.stderr
    assert "sum [3]: " in done.stdout
    code = f"""
import numpy as np
example, found = np.load("{served.folder}/example.npz"), np.load("{tmp_path}/found.npz")
assert len(found.files) == 2
assert all(np.allclose(found[name], example[name][5:8]) for name in found.files)
"""
    assert run(served.python, "-c", code).returncode == 0
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "own.npz").read_bytes()[:100])
    none = "is no file of arrays"
    for file, said in (("half.npz", "has no features"), ("gone.npz", none), ("one.npy", none), ("damaged.npz", none)):
        done = run(*words, tmp_path / file)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    done = run(*words, tmp_path / "own.npz", "--outputs", tmp_path / "gone" / "found.npz")
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


def test_a_bad_request_leaves_the_others_alone(served: Served, tmp_path: Path) -> None:
    """An id beyond the table fails in the model itself, not in the server's check of shapes."""
    done = served.ask("grpc", changed_export(served, tmp_path / "changed", ids="a + 100"))
    assert (done.returncode, "out of data bounds" in done.stderr) == (2, True)
    assert served.ask("grpc").returncode == 0


def test_other_outputs_are_noticed(served: Served, tmp_path: Path) -> None:
    """A difference counts in parts of the output's largest magnitude, as `encore export` counts it."""
    done = served.ask("http", changed_export(served, tmp_path / "changed", sum="a * 1.5"))
    (found,) = json.loads(done.stdout)
    assert (done.returncode, found["same"], found["differences"]["sum"]) == (1, False, pytest.approx(1 / 3, rel=1e-3))


def test_a_server_that_is_not_there_is_waited_for_only_so_long(served: Served) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{held.getsockname()[1]}"
        done = run(served.python, served.folder / "client.py", "--url", url, "--wait", "0.1")
    assert (done.returncode, "is not ready after 0.1 s" in done.stderr) == (2, True)


def test_figures_by_batch_and_clients(served: Served, exported: Path) -> None:
    grid = ("--batches", "1,4,64", "--clients", "1,3", "--requests", "12")
    url = ("--url", f"127.0.0.1:{served.server.ports['grpc']}", "--protocol", "grpc", "--folder", served.folder)
    module = "benchmarks.common.serving.measure"
    done = run(served.python, "-m", module, *grid, *url, "--model", exported / "model.onnx")
    assert done.returncode == 0, done.stderr
    cells: list[dict[str, Any]] = json.loads(done.stdout)
    # A batch of 64 is more than the server takes.
    assert [(cell["batch"], cell["clients"]) for cell in cells] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for cell in cells:
        for side in (cell["server"], cell["direct"]):
            assert 0 < side["p50_ms"] <= side["p90_ms"] <= side["p99_ms"] and side["requests_per_second"] > 0
        own, direct = cell["server"]["requests_per_second"], cell["direct"]["requests_per_second"]
        assert cell["ratio"] == pytest.approx(own / direct)


def test_a_model_that_does_not_load_is_explained(
    encore: Encore, served: Served, exported: Path, tmp_path: Path
) -> None:
    """`--check` starts, asks and ends; here it ends at the start, with the reason and without a process left."""
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken, ignore=shutil.ignore_patterns("triton"))
    (broken / "model.onnx").write_bytes(b"no model")
    http, grpc = free_ports()
    ports = ("--http-port", http, "--grpc-port", grpc, "--metrics-port", "0")
    done = encore("serve", str(broken), "--runtime", "host", "--python", str(served.python), "--check", *ports)
    assert (done.returncode, "the server ended" in done.stderr, "model.onnx" in done.stderr) == (1, True, True)
    assert [each for each in psutil.process_iter(["cwd"]) if (each.info["cwd"] or "").startswith(str(broken))] == []


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: /models/my: No such file or directory",
        "/models/stub: error while loading shared libraries: libarchive.so.13: cannot open shared object file",
    ],
)
def test_a_backend_that_never_starts_is_reported_while_the_server_waits(tmp_path: Path, line: str) -> None:
    noise = 'E1123 12:41:32.821556 26320 server.cc:241] "CudaDriverHelper has not been initialized."'
    script = 'printf "%s\\n" "$@"; exec sleep 60'
    argv = ("sh", "-c", script, "sh", line, noise)
    command = Command(argv=argv, environment=dict(os.environ), working_directory=tmp_path)
    http, grpc = map(int, free_ports())
    started = server.running(command, Ports(http, grpc, 0), ["tiny"], tmp_path / "server.log", 60)
    with pytest.raises(EncoreError, match="cannot start its backend") as error, started:
        pass
    assert line in error.value.found
