"""Reading the file with a backbone's weights: Detectron's pickle of numpy arrays, or PyTorch's state_dict."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Dict

import torch

from benchmarks.common.data.problem import Problem

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
"""What a file of arrays needs; a pickle may name any function of Python, and call it."""


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read(path: Path) -> Dict[str, Any]:
    """Return the arrays of ``path`` by name; raises Problem where it holds none."""
    expected = "R-50.pkl of Detectron (MSRA's ResNet-50), or a state_dict of PyTorch by torchvision's names"
    try:
        with path.open("rb") as file:
            beginning = file.read(2)
        if path.suffix == ".pkl" and beginning != b"PK":
            with path.open("rb") as file:
                found = _Arrays(file, encoding="latin1").load()
            return dict(found.get("blobs", found))
        return dict(torch.load(str(path), map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, pickle.UnpicklingError, AttributeError, ValueError, EOFError) as problem:
        found_ = f"{path} cannot be read as weights: {str(problem).splitlines()[0] if str(problem) else problem!r}"
        raise Problem(found_, expected, "set backbone=FILE to such a file, or leave it empty") from None
