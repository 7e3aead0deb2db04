"""ONNX export of MXNet models by mx2onnx."""

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from benchmarks.common.export.export import ONNX_FILE, TYPES, Arrays, Infer, Subject, Tools, require_for_onnx
from benchmarks.common.frameworks import mxnet


# Recreate the module onnx.mapping, which mx2onnx needs: onnx 1.23 replaced its tables by functions.
def _add_mapping() -> None:
    import onnx

    # Types that do not occur here are not needed.
    numbers = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in (*TYPES, "float64")}
    module: Any = types.ModuleType("onnx.mapping")
    module.NP_TYPE_TO_TENSOR_TYPE = numbers
    module.TENSOR_TYPE_TO_NP_TYPE = {number: dtype for dtype, number in numbers.items()}
    sys.modules[module.__name__] = onnx.mapping = module


# Convert weights to constants: mx2onnx also lists them as inputs, which a server would require from clients.
def _remove_weight_inputs(path: Path) -> None:
    import onnx

    model = onnx.load(str(path))
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def write_onnx(subject: Subject, folder: Path) -> str:
    """Write ``subject.model``, a HybridBlock, as model.onnx; raise Problem without onnx or onnxruntime."""
    require_for_onnx("onnx")
    _add_mapping()
    path = folder / ONNX_FILE
    symbols = subject.model(*(mx.sym.var(item.name) for item in subject.inputs))
    listed = symbols if isinstance(symbols, (tuple, list)) else (symbols,)
    outputs = [mx.sym.identity(item, name=value.name) for item, value in zip(listed, subject.outputs)]
    shapes = [array.shape for array in subject.example]
    with contextlib.redirect_stdout(sys.stderr):  # the last line of standard output is ours
        mx.onnx.export_model(
            mx.sym.Group(outputs),
            {name: item.data() for name, item in subject.model.collect_params().items()},
            in_shapes=shapes,
            in_types=[array.dtype for array in subject.example],
            onnx_file_path=str(path),
            dynamic=subject.batched,
            dynamic_input_shapes=[("batch", *shape[1:]) for shape in shapes],
        )
    _remove_weight_inputs(path)
    return path.name


def _original(subject: Subject) -> Infer:
    def infer(*inputs: np.ndarray) -> Arrays:
        outputs = subject.model(*(mx.nd.array(array, dtype=array.dtype) for array in inputs))
        return tuple(array.asnumpy() for array in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)))

    return infer


TOOLS = Tools(module=mxnet, infer=_original, writers={"onnx": write_onnx})
