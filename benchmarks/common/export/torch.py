"""Write models of PyTorch as ONNX or in torch.export's format."""

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest import mock

import numpy as np
import torch

from benchmarks.common.export.export import ONNX_FILE, Arrays, Infer, Subject, Tools, require_for_onnx
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))  # the process that exports, as a run's only rank
OPSET = 20  # ONNX's version that servers of the last years read
# Bytes of weights in an ONNX file, which is limited to 2 GiB; more are written to a separate file.
LARGEST_FILE = 1 << 30


class Served(torch.nn.Module):
    """A network as a server calls it; ``forward`` has the inputs and outputs of the export."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network


def as_tensors(arrays: Arrays) -> Tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)


def inferring(call: Callable[..., Any]) -> Infer:
    def infer(*inputs: np.ndarray) -> Arrays:
        with torch.no_grad():
            outputs = call(*as_tensors(inputs))
        tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return tuple(tensor.numpy() for tensor in tensors)

    return infer


# Dynamic axes per input for torch.export; the batch is the same in all.
def _axes(subject: Subject) -> List[Dict[int, Any]]:
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    all_axes = []
    for value in subject.inputs:
        axes: Dict[int, Any] = dict.fromkeys(subject.any_size.get(value.name, ()), torch.export.Dim.DYNAMIC)
        all_axes.append({0: batch, **axes} if subject.batched else axes)
    return all_axes


def _program(subject: Subject) -> Any:
    with torch.no_grad():
        axes = tuple(_axes(subject))
        return torch.export.export(subject.model, as_tensors(subject.example), dynamic_shapes=axes, strict=False)


# Allow any length for LSTMs while tracing.
#
# PyTorch infers an LSTM's output shape by unrolling it, which fixes its length, or with oneDNN, which it disables
# during export (torch/export/_trace.py and torch/_decomp/decompositions.py of 2.13).
@contextlib.contextmanager
def _lengths(subject: Subject) -> Iterator[None]:
    if any(isinstance(module, torch.nn.LSTM) for module in subject.model.modules()):
        with mock.patch.object(torch.backends.mkldnn, "set_flags", lambda *_: ()):
            yield
    else:
        yield


# Redirect the exporter's output to standard error: the last line of standard output is the result.
@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def write_torch_export(subject: Subject, folder: Path) -> str:
    """Write model.pt2, which torch.export.load reads."""
    path = folder / "model.pt2"
    with _quiet(), _lengths(subject):
        torch.export.save(_program(subject), str(path))
    return path.name


def write_onnx(subject: Subject, folder: Path) -> str:
    """Write model.onnx; raise Problem without onnxscript or onnxruntime."""
    require_for_onnx("onnx", "onnxscript")
    path = folder / ONNX_FILE
    weights = sum(tensor.nbytes for tensor in subject.model.state_dict().values())
    with _quiet(), _lengths(subject):
        torch.onnx.export(
            _program(subject),
            f=str(path),
            input_names=[value.name for value in subject.inputs],
            output_names=[value.name for value in subject.outputs],
            opset_version=OPSET,
            external_data=weights > LARGEST_FILE,
            dynamo=True,
            verbose=False,
        )
    return path.name


TOOLS = Tools(
    module=pytorch,
    infer=lambda subject: inferring(subject.model),
    writers={"onnx": write_onnx, "torch-export": write_torch_export},
)
