"""Requirements of every framework that writes ONNX."""

from __future__ import annotations

import importlib
import sys

from benchmarks.common.data.problem import Problem

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
                f"use encore export, which installs them; or install requirements/export.txt, without dependencies, "
                f"for {sys.executable}; or another --format",
            ) from None
