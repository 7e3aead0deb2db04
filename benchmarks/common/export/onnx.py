"""An ONNX file as it is read back for a check, whichever framework wrote it."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.common.export.export import Arrays, Infer, Subject

FILE = "model.onnx"


def require(*modules: str) -> None:
    """Raise Problem where this Python lacks one of ``modules`` or onnxruntime."""
    for name in (*modules, "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Problem(
                f"this Python has no {error.name}",
                f"{', '.join(modules)} and onnxruntime for --format onnx",
                f"{sys.executable} -m pip install --no-deps -r requirements/export.txt; or another --format",
            ) from None


def read(path: Path, subject: Subject) -> Infer:
    """Return the model in a file as a function of arrays, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = {each.name for each in session.get_inputs()}
    outputs = [each.name for each in subject.outputs]

    def infer(*inputs: np.ndarray) -> Arrays:
        named = {each.name: array for each, array in zip(subject.inputs, inputs)}
        return tuple(session.run(outputs, {name: array for name, array in named.items() if name in taken}))

    return infer
