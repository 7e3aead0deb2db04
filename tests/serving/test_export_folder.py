"""`encore serve` without a server: reading an export, the model repository, commands of a dry run, error messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encore.cli import serve as command
from encore.errors import EncoreError
from encore.lab.serving import export as exports
from encore.lab.serving import repository as repositories
from encore.lab.serving import server
from tests.results.result_logs import write_files

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
    # Write an export with a model that no server can load
    passport = {**PASSPORT, **changed}
    write_files(folder, {"export.json": passport, "model.onnx": b"weights", "model.onnx.data": b""})
    arrays = {
        field["name"]: np.ones([size if size > 0 else SAMPLES for size in field["shape"]], exports.TYPES[field["type"]])
        for field in (*passport["inputs"], *passport["outputs"])
        if field["type"] in exports.TYPES
    }
    np.savez(folder / "example.npz", **arrays)
    return folder


def config_of(folder: Path, backend: str = "onnxruntime", **changed: Any) -> str:
    (model,) = exports.read(write(folder / "a", **changed))
    return repositories.config_text(
        model.export, repositories.Backend(backend), repositories.Settings(max_batch=16, instances=2, device="gpu")
    )


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
    assert config_of(tmp_path / "batched") == CONFIG
    text = config_of(tmp_path / "escaped", outputs=[{"name": 'a "b"\\\n\u00e9', "type": "FP32", "shape": [-1]}])
    assert 'output {\n  name: "a \\"b\\"\\\\\\012\\303\\251"\n' in text
    fixed = config_of(tmp_path / "fixed", "python", inputs=[{"name": "image", "type": "FP32", "shape": [1, 2, 3]}])
    texts = ("max_batch_size: 0\n", "dims: 1\n  dims: 2\n  dims: 3\n", "dynamic_batching")
    assert [text in fixed for text in texts] == [True, True, False]


def test_parts_are_models_with_numbered_versions(tmp_path: Path) -> None:
    source, folder = tmp_path / "a", tmp_path / "served"
    for part in ("encoder", "decoder"):
        write(source / part, name=f"small-{part}")
    models = exports.read(write_files(source, {"export.json": {**PASSPORT, "parts": ["encoder", "decoder"]}}))
    versions = []
    for weights in (b"weights", b"weights", b"trained on"):
        (source / "encoder" / "model.onnx").unlink()
        (source / "encoder" / "model.onnx").write_bytes(weights)
        plans = [repositories.plan(model, folder) for model in models]
        repositories.write(source, models, plans, repositories.Backend("python"), repositories.Settings())
        versions.append([(model.export.name, plan.version) for model, plan in zip(models, plans, strict=True)])
    assert versions == [[("small-encoder", version), ("small-decoder", 1)] for version in (1, 1, 2)]
    model = folder / "model_repository" / "small-encoder"
    assert ((model / "1" / "model.onnx").read_bytes(), (model / "warmup" / "input_0").stat().st_size) == (
        b"weights",
        24,
    )
    names = [{path.name for path in part.iterdir()} for part in (model / "2", folder / "encoder", folder / "decoder")]
    assert names == [{"model.onnx", "model.onnx.data", "model.py"}, *[{"export.json", "example.npz"}] * 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # Without content: the file, or the folder, is not there
        ("", None, "does not exist"),
        ("export.json", None, "is not an export"),
        ("model.onnx", None, "no model"),
        ("example.npz", None, "example.npz cannot be read"),
        ("example.npz", b"PK\3\4", "example.npz cannot be read"),
        ("export.json", b"{", "cannot be read"),
        *(
            ("export.json", {**PASSPORT, **changed}, message)
            for changed, message in (
                ({"model": "../model.onnx"}, "export.json: model:"),
                ({"outputs": [{"name": "id", "type": "INT128", "shape": [-1]}]}, "did you mean"),
                ({"outputs": [{"name": "id", "type": "INT64", "shape": [7]}]}, r"id is int64 \[4\]"),
                ({"inputs": []}, "export.json: inputs:"),
                ({"parts": ["../a"]}, "has a part"),
            )
        ),
    ],
)
def test_damaged_export_is_rejected(tmp_path: Path, name: str, content: object, message: str) -> None:
    (write(tmp_path / "a") / name).rename(tmp_path / "moved")
    if content is not None:
        write_files(tmp_path / "a", {name: content})
    with pytest.raises(EncoreError, match=message):
        exports.read(tmp_path / "a")


def dry_run(capsys: pytest.CaptureFixture[str], folder: Path, **options: Any) -> dict[str, Any]:
    command.serve(folder, dry_run=True, as_json=True, **options)
    assert not (folder / "triton").exists()
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_dry_run_prints_the_command_of_a_container(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runtime: str
) -> None:
    plan = dry_run(capsys, write(tmp_path / "a"), runtime=runtime, http_port=9000)
    words = plan["command"]
    image = words[words.index("tritonserver") - 1].partition(":")[0]
    assert (Path(words[0]).name, image) == (runtime, "nvcr.io/nvidia/tritonserver")
    mount = f"type=bind,source={tmp_path}/a/triton/model_repository,target=/models,readonly"
    assert {"--user", "--rm", "--model-repository=/models", "--http-port=9000", mount} <= {*words}
    assert {"nvidia.com/gpu=all", "--gpus"} & {*words} and "model_warmup" in plan["models"][0]["config"]


def test_image_depends_on_the_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, saved = (write(tmp_path / name, format=name) for name in ("torch-export", "saved-model"))
    default, own, plan = (dry_run(capsys, folder, **options) for folder, options in (
        (program, {}), (program, {"image": "own:1"}), (saved, {}),
    ))  # fmt: skip
    problems = ["has no PyTorch" in each["problem"] for each in (default, own)]
    assert (problems, "own:1" in own["command"]) == ([True, False], True)
    assert plan["image"] == "nvcr.io/nvidia/tritonserver:25.02-py3"
    assert 'platform: "tensorflow_savedmodel"' in plan["models"][0]["config"]


@pytest.mark.parametrize(
    ("export", "options", "message"),
    [
        ({}, {"batches": "1,0"}, "--batches 1,0"),
        ({}, {"runtime": "host", "python": Path("/nowhere/python")}, "/nowhere/python does not run"),
        ({"format": "onx"}, {"dry_run": True}, "unknown format 'onx'"),
    ],
    ids=["batches", "python", "format"],
)
def test_serve_refuses(tmp_path: Path, export: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EncoreError, match=message):
        command.serve(write(tmp_path / "a", **export), **options)


def python(version: str = "3.11", folder: str = "", library: str = "/usr/lib") -> server.Python:
    return server.Python(Path("/usr/bin/python3"), version, (), folder, library)


def test_wheel_must_fit_the_python(tmp_path: Path) -> None:
    folder = tmp_path / "pytriton"
    own, empty = (python(folder=str(path)) for path in (folder, tmp_path / "empty"))
    backend, stub = f"{server.BACKEND}/utils.py", f"{server.STUBS}/3.11/{server.STUB}"
    write_files(folder, dict.fromkeys((str(server.SERVER), backend, stub), ""))
    write_files(tmp_path / server.LIBRARIES, {"a.so": ""})
    assert server.find_wheel(own, python()) == folder
    for wheel, model, problem in (
        (python(), python(), "lacks nvidia-pytriton"),
        (empty, python(), "tritonserver"),
        (own, python("3.7"), r"does not support Python 3\.7"),
        (own, python(library=""), "built without libpython"),
    ):
        with pytest.raises(EncoreError, match=problem):
            server.find_wheel(wheel, model)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("error: creating server: Internal - failed to load all models\n", "failed to load all models"),
        ('E1122 23:37:54.9 7 http_server.cc:1] "Address already in use"\n', "a port is taken"),
        ("sh: no such file\n", "sh: no such file"),
    ],
    ids=["model", "port", "other"],
)
def test_end_of_a_server_is_explained_by_its_log(tmp_path: Path, log: str, message: str) -> None:
    assert message in str(server.explain(write_files(tmp_path, {"log": log}) / "log", "the server ended"))
