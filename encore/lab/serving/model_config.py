"""config.pbtxt: how Triton serves a model (its docs/user_guide/model_configuration.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from encore.lab.serving.export import Export, Tensor
from encore.lab.serving.text_format import Message, Word, render

PYTHON_BACKEND = "python"


@dataclass(frozen=True, kw_only=True)
class Settings:
    max_batch: int = 32  # samples that the server puts together, at most
    delay_us: int = 100  # microseconds that a request may wait for others to fill its batch
    instances: int = 1  # copies of the model: of each GPU, or of the machine
    device: str = "cpu"


@dataclass(frozen=True)
class Backend:
    name: str
    platform: str = ""


def largest_batch(export: Export, settings: Settings) -> int:
    """Return ``max_batch_size``; 0 where requests cannot be put together: the export has a fixed batch or none."""
    varies = all(each.shape[:1] == (-1,) for each in (*export.inputs, *export.outputs))
    return settings.max_batch if export.batched and varies else 0


def config_text(
    export: Export, backend: Backend, settings: Settings, examples: Mapping[str, np.ndarray] | None = None
) -> str:
    """Return config.pbtxt; ``examples`` are inputs to warm up with."""
    batch = largest_batch(export, settings)
    message: Message = [("name", export.name)]
    message.append(("platform", backend.platform) if backend.platform else ("backend", backend.name))
    message.append(("max_batch_size", batch))
    # The Python backend starts model.py; every other opens the model itself.
    if backend.name != PYTHON_BACKEND:
        message.append(("default_model_filename", export.model))
    message += [("input", _tensor(each, batch > 0)) for each in export.inputs]
    message += [("output", _tensor(each, batch > 0)) for each in export.outputs]
    if batch:
        message.append(("dynamic_batching", [("max_queue_delay_microseconds", settings.delay_us)]))
    kind = Word("KIND_GPU" if settings.device == "gpu" else "KIND_CPU")
    message.append(("instance_group", [("count", settings.instances), ("kind", kind)]))
    if backend.name == PYTHON_BACKEND:
        message += [_parameter("format", export.format), _parameter("model", export.model)]
    if examples:
        message.append(("model_warmup", _warm_up(export, batch, examples)))
    return render(message)


def _tensor(tensor: Tensor, batched: bool) -> Message:
    sizes = tensor.shape[1:] if batched else tensor.shape
    fields: Message = [("name", tensor.name), ("data_type", Word(f"TYPE_{tensor.type}"))]
    if sizes:
        return [*fields, *(("dims", size) for size in sizes)]
    # A tensor must have dimensions: a single value is sent as one of size 1, which the server takes away.
    return [*fields, ("dims", 1), ("reshape", [])]


def warm_up_file(number: int) -> str:
    """Return the name of the file with an input to warm up with; an input's own name may not be a file's."""
    return f"input_{number}"


def _parameter(key: str, value: str) -> tuple[str, Message]:
    return "parameters", [("key", key), ("value", [("string_value", value)])]


def _warm_up(export: Export, batch: int, examples: Mapping[str, np.ndarray]) -> Message:
    fields: Message = [("name", "one sample" if batch else "one request"), ("batch_size", 1 if batch else 0)]
    for number, each in enumerate(export.inputs):
        sizes = examples[each.name].shape[1:] if batch else examples[each.name].shape
        dims: Message = [("dims", size) for size in sizes or (1,)]
        value: Message = [("data_type", Word(f"TYPE_{each.type}")), *dims, ("input_data_file", warm_up_file(number))]
        fields.append(("inputs", [("key", each.name), ("value", value)]))
    return fields
