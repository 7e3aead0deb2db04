"""An export as `encore serve` reads it, the model repository made from it, and the commands of a dry run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encore.cli import serve as command
from encore.errors import EncoreError
from encore.lab.serving import export as exports
from encore.lab.serving import repository as repositories
from encore.lab.serving import server
from encore.lab.serving.repository import Backend, Settings, config_text

SAMPLES = 4
PASSPORT: dict[str, Any] = {
    "name": "small",
    "benchmark": "small",
    "framework": "pytorch",
    "format": "onnx",
    "model": "model.onnx",
    "inputs": [{"name": "image", "type": "FP32", "shape": [-1, 2, 3]}, {"name": "id", "type": "INT64", "shape": [-1]}],
    "outputs": [{"name": 'raw "scores"', "type": "FP32", "shape": [-1, 5]}],
    "batched": True,
    "reached": True,
    "checked": {"tolerance": 1e-5},
}


def write(folder: Path, **changed: Any) -> Path:
    """Write an export that no server can load: for what happens before one is started."""
    folder.mkdir(parents=True)
    passport = {**PASSPORT, **changed}
    (folder / "export.json").write_text(json.dumps(passport), encoding="utf-8")
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / "model.onnx.data").touch()
    arrays = {
        each["name"]: np.ones([size if size > 0 else SAMPLES for size in each["shape"]], exports.TYPES[each["type"]])
        for each in (*passport["inputs"], *passport["outputs"])
        if each["type"] in exports.TYPES
    }
    np.savez(folder / "example.npz", **arrays)
    return folder


def read(folder: Path) -> exports.Export:
    (model,) = exports.read(folder)
    return model.export


CONFIG = r"""name: "small"
backend: "onnxruntime"
max_batch_size: 16
default_model_filename: "model.onnx"
input {
  name: "image"
  data_type: TYPE_FP32
  dims: 2
  dims: 3
}
input {
  name: "id"
  data_type: TYPE_INT64
  dims: 1
  reshape {
  }
}
output {
  name: "raw \"scores\""
  data_type: TYPE_FP32
  dims: 5
}
dynamic_batching {
  max_queue_delay_microseconds: 100
}
instance_group {
  count: 2
  kind: KIND_GPU
}
"""


def test_config_has_shapes_types_batching_and_instances(tmp_path: Path) -> None:
    export = read(write(tmp_path / "a"))
    settings = Settings(max_batch=16, instances=2, device="gpu")
    assert config_text(export, Backend("onnxruntime"), settings) == CONFIG


def test_a_fixed_batch_is_served_as_it_is(tmp_path: Path) -> None:
    fixed = [{"name": "image", "type": "FP32", "shape": [1, 2, 3]}]
    text = config_text(read(write(tmp_path / "a", inputs=fixed)), Backend("onnxruntime"), Settings())
    assert "max_batch_size: 0\n" in text and "dims: 1\n  dims: 2\n  dims: 3\n" in text
    assert "dynamic_batching" not in text


def test_text_format_is_escaped(tmp_path: Path) -> None:
    named = [{"name": 'a "b"\\\n\u00e9', "type": "FP32", "shape": [-1]}]
    text = config_text(read(write(tmp_path / "a", outputs=named)), Backend("python"), Settings())
    assert 'output {\n  name: "a \\"b\\"\\\\\\012\\303\\251"\n' in text


def test_versions_are_numbered_and_parts_are_models_of_one_repository(tmp_path: Path) -> None:
    source, folder = tmp_path / "a", tmp_path / "served"
    parts = [write(source / part, name=f"small-{part}") for part in ("encoder", "decoder")]
    (source / "export.json").write_text(json.dumps({**PASSPORT, "parts": ["encoder", "decoder"]}), encoding="utf-8")
    models = exports.read(source)
    assert [each.export.name for each in models] == ["small-encoder", "small-decoder"]

    def serve() -> list[int]:
        planned = [repositories.plan(each, folder) for each in models]
        repositories.write(source, models, planned, Backend("python"), Settings())
        return [each.version for each in planned]

    assert [serve(), serve()] == [[1, 1], [1, 1]]
    (parts[0] / "model.onnx").unlink()
    (parts[0] / "model.onnx").write_bytes(b"trained on")
    assert serve() == [2, 1]
    model = folder / "model_repository" / "small-encoder"
    assert (model / "1" / "model.onnx").read_bytes() == b"weights"
    assert {path.name for path in (model / "2").iterdir()} == {"model.onnx", "model.onnx.data", "model.py"}
    assert (model / "warmup" / "input_0").stat().st_size == 2 * 3 * 4
    for part in ("encoder", "decoder"):
        assert {path.name for path in (folder / part).iterdir()} == {"export.json", "example.npz"}


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "export.json").write_text(json.dumps({**PASSPORT, **changed}), encoding="utf-8")

    return change


BAD: tuple[tuple[str, Callable[[Path], None], str], ...] = (
    ("no folder", shutil.rmtree, "no folder"),
    ("no passport", without("export.json"), "is no export"),
    ("no model", without("model.onnx"), "no model"),
    ("no example", without("example.npz"), "example.npz cannot be read"),
    ("damaged example", lambda folder: (folder / "example.npz").write_bytes(b"PK\3\4"), "example.npz cannot be read"),  # type: ignore[func-returns-value]
    ("damaged passport", lambda folder: (folder / "export.json").write_text("{"), "cannot be read"),  # type: ignore[func-returns-value]
    ("a path as the model", rewrite(model="../model.onnx"), "export.json: model:"),
    ("unknown type", rewrite(outputs=[{"name": "id", "type": "INT128", "shape": [-1]}]), "did you mean"),
    ("other shape", rewrite(outputs=[{"name": "id", "type": "INT64", "shape": [7]}]), r"id is int64 \[4\]"),
    ("no inputs", rewrite(inputs=[]), "export.json: inputs:"),
    ("a path as a part", rewrite(parts=["../a"]), "has a part"),
)


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_is_no_export_is_refused(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    folder = write(tmp_path / "a")
    change(folder)
    with pytest.raises(EncoreError, match=words):
        exports.read(folder)


def dry_run(capsys: pytest.CaptureFixture[str], folder: Path, **options: Any) -> dict[str, Any]:
    command.serve(folder, dry_run=True, as_json=True, **options)
    assert not (folder / "triton").exists()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_dry_run_prints_the_command_of_a_container(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runtime: str
) -> None:
    folder = write(tmp_path / "a")
    found = dry_run(capsys, folder, runtime=runtime, http_port=9000)
    words = found["command"]
    assert Path(words[0]).name == runtime
    assert words[words.index("tritonserver") - 1].startswith("nvcr.io/nvidia/tritonserver:")
    mount = f"type=bind,source={folder}/triton/model_repository,target=/models,readonly"
    assert {"--user", "--rm", "--model-repository=/models", "--http-port=9000", mount} <= {*words}
    assert {"nvidia.com/gpu=all", "--gpus"} & {*words} and "model_warmup" in found["models"][0]["config"]


def test_each_format_has_the_image_that_serves_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = write(tmp_path / "program", format="torch-export")
    assert "has no PyTorch" in dry_run(capsys, program)["problem"]
    own = dry_run(capsys, program, image="own:1")
    assert ("own:1" in own["command"], "has no PyTorch" in own["problem"]) == (True, False)
    saved = dry_run(capsys, write(tmp_path / "saved", format="saved-model"))
    found = (saved["image"], 'platform: "tensorflow_savedmodel"' in saved["models"][0]["config"])
    assert found == ("nvcr.io/nvidia/tritonserver:25.02-py3", True)
    with pytest.raises(EncoreError, match="unknown format 'onx'"):
        dry_run(capsys, write(tmp_path / "other", format="onx"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches": "1,0"}, "--batches 1,0"),
        ({"runtime": "host", "python": Path("/nowhere/python")}, "/nowhere/python does not run"),
    ],
    ids=["batches", "python"],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(EncoreError, match=said):
        command.serve(write(tmp_path / "a"), **options)


def python(version: str = "3.11", folder: str = "", library: str = "/usr/lib") -> server.Python:
    return server.Python(Path("/usr/bin/python3"), version, (), folder, library)


def test_a_wheel_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pytriton"
    own = python(folder=str(folder))

    def refused(by: server.Python, model: server.Python) -> str:
        with pytest.raises(EncoreError) as raised:
            server.find_wheel(by, model)
        return str(raised.value)

    assert "no nvidia-pytriton" in refused(python(), python()) and "tritonserver" in refused(own, python())
    for path in (
        folder / server.SERVER,
        folder / server.BACKEND / "utils.py",
        folder / server.STUBS / "3.11" / server.STUB,
        tmp_path / server.LIBRARIES / "a.so",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert server.find_wheel(own, python()) == folder
    assert "no model in Python 3.7" in refused(own, python("3.7"))
    assert "built without libpython" in refused(own, python(library=""))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("error: creating server: Internal - failed to load all models\n", "failed to load all models"),
        ('E1122 23:37:54.9 7 http_server.cc:1] "Address already in use"\n', "a port is taken"),
        ("sh: no such file\n", "sh: no such file"),
    ],
    ids=["model", "port", "anything"],
)
def test_the_end_of_a_server_is_explained(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "log").write_text(log, encoding="utf-8")
    assert said in str(server.explain(tmp_path / "log", "the server ended"))
