"""Model of `encore export` in Triton's Python backend.

config.pbtxt has ``format`` and ``model`` (its file) as parameters. Requests that the server groups run as one batch.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import numpy as np

Arrays = Dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # from inputs to outputs, by name


def open_onnx(path: Path, outputs: Sequence[str], device: str) -> Run:
    """Open an ONNX model in ONNX Runtime, on a GPU if ``device`` is gpu."""
    import onnxruntime

    provider = "CUDAExecutionProvider" if device == "gpu" else "CPUExecutionProvider"
    # ONNX Runtime would only warn and use the CPU.
    if provider not in onnxruntime.get_available_providers():
        raise RuntimeError(f"this ONNX Runtime has no {provider}: install onnxruntime-gpu, or serve with --device cpu")
    session = onnxruntime.InferenceSession(str(path), providers=[provider])
    # The exporter leaves out an input that no output depends on.
    input_names = {array.name for array in session.get_inputs()}

    def run(inputs: Arrays) -> Arrays:
        used = {name: array for name, array in inputs.items() if name in input_names}
        return dict(zip(outputs, session.run(list(outputs), used)))

    return run


def open_torch_export(path: Path, outputs: Sequence[str], device: str) -> Run:
    """Open a torch.export program; its inputs are in the order of config.pbtxt."""
    import torch

    target = torch.device("cuda" if device == "gpu" else "cpu")
    program = torch.export.load(str(path)).module().to(target)

    def run(inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            results = program(*(torch.from_numpy(np.ascontiguousarray(array)).to(target) for array in inputs.values()))
        if isinstance(results, dict):
            return {name: results[name].cpu().numpy() for name in outputs}
        results = results if isinstance(results, (tuple, list)) else [results]
        return {name: array.cpu().numpy() for name, array in zip(outputs, results)}

    return run


def open_saved_model(path: Path, outputs: Sequence[str], device: str) -> Run:
    """Open a SavedModel's signature ``serving_default``."""
    import tensorflow as tf

    # The signature belongs to the model, which must not be collected before it.
    loaded = tf.saved_model.load(str(path))
    signature = loaded.signatures["serving_default"]

    def run(inputs: Arrays, model: Any = loaded) -> Arrays:
        results = signature(**{name: tf.constant(array) for name, array in inputs.items()})
        return {name: results[name].numpy() for name in outputs}

    return run


# Keys: `encore export --format`
OPENERS = {"onnx": open_onnx, "torch-export": open_torch_export, "saved-model": open_saved_model}


class TritonPythonModel:
    """The names are Triton's: triton-inference-server/python_backend, README, Usage."""

    def initialize(self, args: Dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.inputs = [entry["name"] for entry in config["input"]]
        self.outputs = [entry["name"] for entry in config["output"]]
        self.batched = config["max_batch_size"] > 0
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        path = Path(args["model_repository"]) / args["model_version"] / parameters["model"]
        device = "gpu" if args["model_instance_kind"] == "GPU" else "cpu"
        self.run = OPENERS[parameters["format"]](path, self.outputs, device)

    def execute(self, requests: List[Any]) -> List[Any]:
        """Answer requests, in one batch if possible; a failing request does not affect the others."""
        batches = [self._arrays(request) for request in requests]
        if not self.batched or len(batches) == 1:
            return [self._answer(inputs) for inputs in batches]
        try:
            together = self.run({name: np.concatenate([arrays[name] for arrays in batches]) for name in self.inputs})
        except Exception:
            return [self._answer(inputs) for inputs in batches]
        ends = np.cumsum([len(inputs[self.inputs[0]]) for inputs in batches])[:-1]
        parts = {name: np.split(values, ends) for name, values in together.items()}
        return [self._response({name: parts[name][number] for name in self.outputs}) for number in range(len(batches))]

    def _arrays(self, request: Any) -> Arrays:
        import triton_python_backend_utils as triton

        return {name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}

    def _answer(self, inputs: Arrays) -> Any:
        import triton_python_backend_utils as triton

        try:
            return self._response(self.run(inputs))
        except Exception as error:
            return triton.InferenceResponse(error=triton.TritonError(f"{type(error).__name__}: {error}"))

    def _response(self, outputs: Arrays) -> Any:
        import triton_python_backend_utils as triton

        return triton.InferenceResponse([triton.Tensor(name, outputs[name]) for name in self.outputs])
