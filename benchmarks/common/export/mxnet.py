"""Models of MXNet as ONNX: written by MXNet's own mx2onnx, and read back for a check."""

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from benchmarks.common.export.export import ONNX_FILE, TYPES, Arrays, Infer, Subject, Tools, require_for_onnx
from benchmarks.common.frameworks import mxnet


# Give onnx its module ``mapping`` back, whose tables mx2onnx reads: onnx 1.23 has functions in their place.
def _add_mapping() -> None:
    import onnx

    # mx2onnx asks nothing of types that no network here has.
    numbers = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in (*TYPES, "float64")}
    module: Any = types.ModuleType("onnx.mapping")
    module.NP_TYPE_TO_TENSOR_TYPE = numbers
    module.TENSOR_TYPE_TO_NP_TYPE = {number: dtype for dtype, number in numbers.items()}
    sys.modules[module.__name__] = onnx.mapping = module


# Make weights constants: mx2onnx lists them as inputs too, and a server would ask its clients for them.
def _without_weights_as_inputs(path: Path) -> None:
    import onnx

    model = onnx.load(str(path))
    weights = {each.name for each in model.graph.initializer}
    kept = [each for each in model.graph.input if each.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def write_onnx(subject: Subject, folder: Path) -> str:
    """Write model.onnx of ``subject.model``, a HybridBlock; Problem where this Python has no onnx or onnxruntime."""
    require_for_onnx("onnx")
    _add_mapping()
    path = folder / ONNX_FILE
    found = subject.model(*(mx.sym.var(each.name) for each in subject.inputs))
    listed = found if isinstance(found, (tuple, list)) else (found,)
    outputs = [mx.sym.identity(each, name=value.name) for each, value in zip(listed, subject.outputs)]
    shapes = [array.shape for array in subject.example]
    with contextlib.redirect_stdout(sys.stderr):  # the last line of standard output is ours
        mx.onnx.export_model(
            mx.sym.Group(outputs),
            {name: each.data() for name, each in subject.model.collect_params().items()},
            in_shapes=shapes,
            in_types=[array.dtype for array in subject.example],
            onnx_file_path=str(path),
            dynamic=subject.batched,
            dynamic_input_shapes=[("batch", *shape[1:]) for shape in shapes],
        )
    _without_weights_as_inputs(path)
    return path.name


def _original(subject: Subject) -> Infer:
    def infer(*inputs: np.ndarray) -> Arrays:
        found = subject.model(*(mx.nd.array(each, dtype=each.dtype) for each in inputs))
        return tuple(each.asnumpy() for each in (found if isinstance(found, (tuple, list)) else (found,)))

    return infer


TOOLS = Tools(module=mxnet, infer=_original, writers={"onnx": write_onnx})
