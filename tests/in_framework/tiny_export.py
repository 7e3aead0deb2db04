"""Write a small export: python tiny_export.py DIR. Runs in the environment of `encore serve`, which has ONNX."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ROWS, WIDTH, CLASSES, SAMPLES = 5, 8, 3, 40
QUOTED = 'scores "raw"'  # a name that config.pbtxt has to escape


def graph() -> onnx.GraphProto:
    generator = np.random.default_rng(7)
    constants = [
        *(
            numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name)
            for name, shape in {"table": (ROWS, WIDTH), "matrix": (WIDTH, CLASSES)}.items()
        ),
        numpy_helper.from_array(np.array([1]), "axes"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Add", ["rows", "features"], ["both"]),
        helper.make_node("MatMul", ["both", "matrix"], [QUOTED]),
        helper.make_node("ReduceSum", ["both", "axes"], ["sum"], keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", WIDTH]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
    ]
    outputs = [
        helper.make_tensor_value_info(QUOTED, TensorProto.FLOAT, ["n", CLASSES]),
        helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n"]),
    ]
    return helper.make_graph(nodes, "tiny", inputs, outputs, constants)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph(), opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    generator = np.random.default_rng(8)
    inputs = {
        "features": generator.normal(size=(SAMPLES, WIDTH)).astype(np.float32),
        "ids": generator.integers(0, ROWS, SAMPLES),
    }
    found = onnxruntime.InferenceSession(folder / "model.onnx").run([QUOTED, "sum"], inputs)
    np.savez(folder / "example.npz", **inputs, **dict(zip((QUOTED, "sum"), found)))
    manifest = {
        "name": "tiny",
        "benchmark": "tiny",
        "framework": "pytorch",
        "format": "onnx",
        "model": "model.onnx",
        "inputs": [
            {"name": "features", "type": "FP32", "shape": [-1, WIDTH], "about": "features of a sample"},
            {"name": "ids", "type": "INT64", "shape": [-1], "about": "row of the table"},
        ],
        "outputs": [
            {"name": QUOTED, "type": "FP32", "shape": [-1, CLASSES], "about": ""},
            {"name": "sum", "type": "FP32", "shape": [-1], "about": ""},
        ],
        "batched": True,
        "quality": {"accuracy": 0.5},
        "reached": True,
        "checked": {"samples": SAMPLES, "largest_difference": 0.0, "tolerance": 1e-5},
    }
    (folder / "export.json").write_text(json.dumps(manifest), encoding="utf-8")


if __name__ == "__main__":
    main()
