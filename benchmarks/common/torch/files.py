"""Safe readers for published weights; code in the files is never executed.

Formats: Detectron's pickles of numpy arrays (R-50.pkl), torch.save files, and torch.save files from before 2017, a
tar of storages, tensors and names, such as torchvision's resnet34-333f7ec4.pth (pytorch/vision#2068). torch.load
reads such a tar only with weights_only=False, which executes the pickle.
"""

import pickle
import struct
import tarfile
from collections import OrderedDict
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
# Type of the numbers in a storage of the tar.
KINDS = {
    f"{name}Storage": np.dtype(kind)
    for name, kind in (
        ("Float", "<f4"), ("Double", "<f8"), ("Half", "<f2"), ("Long", "<i8"), ("Int", "<i4"), ("Byte", "u1"),
    )
}  # fmt: skip


# Unpickler for numpy arrays; latin1 decodes the strings of Python 2.
class _Arrays(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


# Stand-in for torch.nn.Parameter in old state_dicts: the tensor is its first argument, or the first item in its state.
class _Parameter:
    def __new__(cls, data: Any = None, *_: Any) -> "_Parameter":
        parameter = super().__new__(cls)
        parameter.data = data
        return parameter

    data: Any

    def __setstate__(self, state: Any) -> None:
        if len(state) == 5:
            self.data = state[0]


class _Parts(pickle.Unpickler):
    def __init__(self, file: IO[bytes], tensors: Dict[int, torch.Tensor]) -> None:
        super().__init__(file, encoding="latin1")
        self._tensors = tensors

    def persistent_load(self, saved_id: Any) -> Any:
        return self._tensors[int(saved_id)]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.nn.parameter", "Parameter"):
            return _Parameter
        if module in ("torch", "torch.cuda") and name.endswith(("Storage", "Tensor")):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}")


# Return the object in a file of torch.save from before 2017 (legacy_load of torch/serialization.py).
def _read_legacy_tar(path: Path) -> Any:
    storages: Dict[int, np.ndarray] = {}
    tensors: Dict[int, torch.Tensor] = {}
    with tarfile.open(str(path), "r:") as tar:

        def member(name: str) -> IO[bytes]:
            member_file = tar.extractfile(name)
            if member_file is None:
                raise ValueError(f"{name} is not a file")
            return member_file

        with member("storages") as file:
            for _ in range(_Parts(file, {}).load()):
                number, _, kind = _Parts(file, {}).load()
                (count,) = struct.unpack("<q", file.read(8))
                values = file.read(count * KINDS[kind].itemsize)
                storages[number] = np.frombuffer(bytearray(values), KINDS[kind])
            for number, parent, offset, count in _Parts(file, {}).load():
                storages[number] = storages[parent][offset : offset + count]
        with member("tensors") as file:
            for _ in range(_Parts(file, {}).load()):
                number, storage, _ = _Parts(file, {}).load()
                (axes,) = struct.unpack("<i4x", file.read(8))
                *numbers, offset = struct.unpack(f"<{2 * axes + 1}q", file.read(8 * (2 * axes + 1)))
                tensors[number] = torch.from_numpy(storages[storage]).as_strided(numbers[:axes], numbers[axes:], offset)
        with member("pickle") as file:
            return _Parts(file, tensors).load()


def _content(path: Path) -> Any:
    with path.open("rb") as file:
        if path.suffix in (".pkl", ".pickle"):
            return _Arrays(file).load()
    if tarfile.is_tarfile(str(path)):
        return _read_legacy_tar(path)
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
    plain = {name: value.data if isinstance(value, _Parameter) else value for name, value in content.items()}
    return {
        name: torch.as_tensor(value) for name, value in plain.items() if isinstance(value, (np.ndarray, torch.Tensor))
    }
