"""Write models of TensorFlow as SavedModel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np

from benchmarks.common.export.export import Arrays, Infer, Subject, Tools
from benchmarks.common.frameworks import tensorflow

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

SIGNATURE = "serving_default"  # called by servers


@dataclass(frozen=True)
class Evaluating:
    """A network as it evaluates, for `Subject.model`."""

    network: Any  # called with tensors and ``training=False``
    postprocess: Callable[[Any], Any] = lambda found: found  # the function that follows it in the exported model

    @property
    def variables(self) -> Dict[str, tf.Variable]:
        return self.network.variables

    def __call__(self, *inputs: tf.Tensor) -> Any:
        return self.postprocess(self.network(*inputs, training=False))


def write_saved_model(subject: Subject, folder: Path) -> str:
    """Write saved_model/; ``subject.model`` is called with tensors and has ``variables``, by any names."""
    path = folder / "saved_model"
    specs = []
    for value, array in zip(subject.inputs, subject.example):
        shape = [None, *array.shape[1:]] if subject.batched else list(array.shape)
        specs.append(tf.TensorSpec(shape, array.dtype, value.name))
    names = [output.name for output in subject.outputs]

    @tf.function(input_signature=specs)
    def serve(*inputs: tf.Tensor) -> Any:
        return dict(zip(names, _listed(subject.model(*inputs))))

    module = tf.Module()
    module.kept = list(subject.model.variables.values())
    module.serve = serve
    tf.saved_model.save(module, str(path), signatures={SIGNATURE: serve})
    return path.name


def _listed(outputs: Any) -> Tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _original(subject: Subject) -> Infer:
    def infer(*inputs: np.ndarray) -> Arrays:
        return tuple(tensor.numpy() for tensor in _listed(subject.model(*map(tf.constant, inputs))))

    return infer


TOOLS = Tools(module=tensorflow, infer=_original, writers={"saved-model": write_saved_model})
