"""Safe readers for published weights; code in the files is never executed.

Formats: Detectron's pickles of numpy arrays (R-50.pkl), and torch.save files. Files of torch.save from before 2017,
such as torchvision's resnet34-333f7ec4.pth, are rejected: torch.load would execute their pickle (pytorch/vision#2068).
"""

import pickle
from pathlib import Path
from typing import IO, Any, Dict, Mapping

import numpy as np
import torch

from benchmarks.common.data.problem import Problem

# Names that a file of arrays needs; a pickle may name any function of Python, and call it.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
}


# Unpickler for numpy arrays; latin1 decodes the strings of Python 2.
class _Arrays(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        if path.suffix in (".pkl", ".pickle"):
            return _Arrays(file).load()
    try:
        return torch.load(str(path), "cpu", weights_only=True)
    except Exception as error:
        # The message of torch.load recommends executing the file.
        raise ValueError(f"{type(error).__name__} in torch.load, which reads tensors only") from None


def load(path: Path, expected: str, hint: str) -> Dict[str, Any]:
    """Return the weights in a file by name; raise Problem with ``expected`` and ``hint`` if it cannot be read."""
    try:
        content = _content(path)
        if not isinstance(content, dict):
            raise ValueError(f"it contains {type(content).__name__}, not a dict of names")
        return content
    # A damaged file may raise anything.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        raise Problem(f"{path} cannot be read as weights: {reason.splitlines()[0]}", expected, hint) from None


def tensors_of(content: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    return {
        name: torch.as_tensor(value) for name, value in content.items() if isinstance(value, (np.ndarray, torch.Tensor))
    }
