"""Write a trained model for serving, load it again, and check it on the evaluation set, for any framework.

An implementation's ``export.py`` defines the model as a :class:`Subject` or as :class:`Parts`. The framework modules
here write the formats, benchmarks/common/serving/model.py loads them. The output folder contains the model,
``example.npz`` (inputs and outputs of some samples, by name) and the manifest ``export.json``. With several parts,
each has such a folder, listed in the manifest. Everything runs on the CPU in fp32, the type of the weights.
``--through`` runs the same check with the model in a server: `encore serve --evaluate`.
"""

import argparse
import dataclasses
import importlib
import json
import operator
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np

from benchmarks.common.data import manifest
from benchmarks.common.data.problem import FAILED, Problem
from benchmarks.common.run import configuration
from benchmarks.common.run.checkpoints import read_for_inference
from benchmarks.common.run.stopping import end_process
from benchmarks.common.serving import client
from benchmarks.common.serving.client import difference as difference_of
from benchmarks.common.serving.model import OPENERS

SCHEMA = 1
FILE = "export.json"
EXAMPLE = "example.npz"
ONNX_FILE = "model.onnx"
READY_SECONDS = 10.0  # for a server
EXAMPLES = 8  # maximum number of samples in EXAMPLE
METRICS = 1  # index of the metrics stream in a checkpoint's ``log_lengths``
# Triton's names of NumPy's types.
TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32",
}  # fmt: skip
# Model settings for inference only
ON_CPU = {
    "device": "cpu", "precision": "fp32", "cuda_graph": False, "kernels": "plain", "optimizer_kernel": "plain",
    "attention": "auto", "fp8": "none", "warm_up_steps": 0, "fused_relu": False,
}  # fmt: skip

Arrays = Tuple[np.ndarray, ...]
Infer = Callable[..., Arrays]  # takes the inputs in order and returns the outputs in order
C = TypeVar("C")


@dataclass(frozen=True)
class Value:
    """An input or output: name and meaning."""

    name: str
    about: str


@dataclass(frozen=True)
class Subject:
    """A model to export, and how it is checked."""

    model: Any  # of the framework, ready for inference: takes the inputs in order
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    example: Arrays  # inputs for tracing; at least two samples if batched
    preprocessing: Mapping[str, Any]  # preprocessing that a client has to do
    # Runs a model on the evaluation set and returns the quality as in the log, or {} without an evaluation. None:
    # evaluated together with other parts.
    evaluate: Optional[Callable[[Infer], Mapping[str, float]]] = None
    original: Optional[Infer] = None  # computes the outputs with the training code, if that is not ``model``
    batched: bool = True  # whether all inputs and outputs have the batch as first axis, of any size
    # Further axes of inputs and outputs, by name, that have any size.
    any_size: Mapping[str, Sequence[int]] = field(default_factory=dict)
    shown: int = 0  # which call of the evaluation the example is from; where it makes fewer, the last
    # Maximum output difference, relative to the output's largest magnitude in the batch if that is above 1.
    tolerance: float = 1e-4
    # Fraction of samples that may differ by more: rounding can flip discrete decisions of the model.
    turned: float = 0.0


@dataclass(frozen=True)
class Parts:
    """Models that a client calls in turn, such as an encoder and a decoder step."""

    subjects: Mapping[str, Subject]  # by part name, which is also its folder
    # Runs all parts on the evaluation set and returns the quality, see `Subject`.
    evaluate: Callable[[Mapping[str, Infer]], Mapping[str, float]]


WHOLE = ""  # name of the part if there is only one
Writer = Callable[[Subject, Path], str]  # writes a subject's model into a folder; returns the name that it got there
# Arguments: configuration, checkpoint content, data folder.
Prepare = Callable[[Any, Mapping[str, Any], Path], Union[Subject, Parts]]
# Arguments: experiment folder, module of benchmarks/common/frameworks; see checkpoints.read_for_inference.
Read = Callable[[Path, Any], Tuple[Dict[str, Any], Dict[str, Any]]]


@dataclass(frozen=True)
class Tools:
    """A framework's part."""

    module: Any  # module of benchmarks/common/frameworks, which reads checkpoints
    infer: Callable[[Subject], Infer]  # a subject's model before it is exported
    writers: Mapping[str, Writer]  # by the name of the format; the first one is the default


def on_cpu(config: C, **overrides: Any) -> C:
    """Return the configuration for inference on a CPU, with ``overrides`` in addition."""
    names = {field_.name for field_ in dataclasses.fields(config)}  # type: ignore[arg-type]
    changes: Dict[str, Any] = {name: value for name, value in ON_CPU.items() if name in names}
    if "compile" in names:
        changes["compile"] = False if isinstance(getattr(config, "compile"), bool) else "none"  # noqa: B009
    return dataclasses.replace(config, **{**changes, **overrides})  # type: ignore[type-var]


def require_for_onnx(*modules: str) -> None:
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


class Checked:
    """Calls the exported and the original model and compares their outputs."""

    def __init__(self, subject: Subject, exported: Infer, original: Infer) -> None:
        self.subject, self._exported, self._original = subject, exported, original
        self._calls = self.samples = 0
        self.difference = 0.0
        # Samples that differ by more than the tolerance, where some may; they are not in ``difference``.
        self.turned = 0
        self.shown: Tuple[Arrays, Arrays] = ((), ())

    def __call__(self, *inputs: np.ndarray) -> Arrays:
        subject, outputs, expected = self.subject, self._exported(*inputs), self._original(*inputs)
        for value, actual, reference in zip(subject.outputs, outputs, expected):
            if actual.shape != reference.shape or actual.dtype != reference.dtype:
                kinds = [f"{array.dtype} {list(array.shape)}" for array in (actual, reference)]
                raise Problem(f"the exported model's {value.name} is {kinds[0]}", kinds[1], code=FAILED)
        # Where some may differ, sample by sample.
        parts = zip(zip(*outputs), zip(*expected)) if subject.turned else [(outputs, expected)]
        for output, original in parts:
            difference = max(map(difference_of, output, original))
            if subject.turned and not difference <= subject.tolerance:
                self.turned += 1
            else:
                self.difference = max(self.difference, difference)
        if self._calls <= subject.shown:
            self.shown = (inputs, outputs)
        self._calls += 1
        self.samples += len(inputs[0]) if subject.batched else 1
        return outputs

    def refuse_difference(self, name: str) -> None:
        """Raise Problem where the outputs differ by more than the tolerance."""
        subject, again = self.subject, ("export it again, or in another --format", FAILED)
        if self.turned > subject.turned * self.samples:
            raise Problem(
                f"{self.turned} samples of {self.samples} differ from the training code's by more than "
                f"{subject.tolerance:.2g}",
                f"at most {subject.turned:.0%}, whose discrete decisions were flipped by rounding",
                *again,
            )
        if not self.difference <= subject.tolerance:
            raise Problem(
                f"the outputs of the exported {name or 'model'} differ by {self.difference:.2g} "
                "from the training code's",
                f"at most {subject.tolerance:.2g}, over {self.samples} samples of the evaluation set",
                *again,
            )

    def figures(self) -> Dict[str, Any]:
        figures = {
            "samples": self.samples,
            "largest_difference": self.difference,
            "tolerance": self.subject.tolerance,
        }
        return {**figures, "turned": self.turned} if self.subject.turned else figures


def newest(experiment: Path, framework: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    return read_for_inference(experiment / "checkpoint", framework)


def evaluated(experiment: Path, state: Mapping[str, Any]) -> Dict[str, float]:
    """Return the quality that the run measured of the model in a checkpoint; empty: it was written in between."""
    if state["evaluated"] != state["step"]:
        return {}
    with open(experiment / "metrics.jsonl", "rb") as file:
        # An evaluation may finish after the logs were last measured; a finished run's log is complete.
        lines = file.read(-1 if state["trained"] else state["log_lengths"][METRICS]).splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    return dict(evaluations[-1]["qualities"]) if evaluations else {}


def describe(values: Sequence[Value], arrays: Arrays, subject: Subject) -> List[Dict[str, Any]]:
    """Return inputs or outputs as in the manifest; -1 is an axis of any size."""
    described = []
    for value, array in zip(values, arrays):
        free = {*subject.any_size.get(value.name, ()), *([0] if subject.batched else [])}
        shape = [-1 if axis in free else size for axis, size in enumerate(array.shape)]
        described.append({"name": value.name, "type": TYPES[array.dtype.name], "shape": shape, "about": value.about})
    return described


def as_parts(prepared: Union[Subject, Parts]) -> Parts:
    if isinstance(prepared, Parts):
        return prepared
    evaluate = prepared.evaluate
    return Parts({WHOLE: prepared}, lambda infer: evaluate(infer[WHOLE]) if evaluate else {})


def check(parts: Parts, exported: Mapping[str, Infer], tools: Tools) -> Tuple[Dict[str, Checked], Dict[str, Any]]:
    """Evaluate models exported from ``parts``; return the comparison per part and the overall result.

    The overall result comes from the part closest to its tolerance, with the quality.

    Raises:
        Problem: the outputs differ by more than the tolerance.
    """
    checked = {
        name: Checked(subject, exported[name], subject.original or tools.infer(subject))
        for name, subject in parts.subjects.items()
    }
    quality = dict(parts.evaluate(checked))
    for name, model in checked.items():
        model.refuse_difference(name)
    nearest = max(checked.values(), key=lambda model: model.difference / (model.subject.tolerance or 1.0)).figures()
    return checked, {**nearest, "quality": quality} if quality else nearest


def by_position(subject: Subject, run: Callable[[Dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Infer:
    """Convert a model with named arrays to one with positional arrays."""

    def infer(*inputs: np.ndarray) -> Arrays:
        results = run({value.name: np.ascontiguousarray(array) for value, array in zip(subject.inputs, inputs)})
        return tuple(results[output.name] for output in subject.outputs)

    return infer


def export(parts: Parts, tools: Tools, format_name: str, folder: Path) -> Dict[str, Any]:
    """Write and check; return the manifest fields, with ``parts`` if there are several.

    Raises:
        Problem: the outputs differ by more than the tolerance.
    """
    files, exported = {}, {}
    for name, subject in parts.subjects.items():
        (folder / name).mkdir(exist_ok=True)
        files[name] = tools.writers[format_name](subject, folder / name)
        opened = OPENERS[format_name](folder / name / files[name], [value.name for value in subject.outputs], "cpu")
        exported[name] = by_position(subject, opened)
    checked, together = check(parts, exported, tools)
    described = {}
    for name, subject in parts.subjects.items():
        inputs, outputs = checked[name].shown
        values = zip((*subject.inputs, *subject.outputs), (*inputs, *outputs))
        # The first checked samples; only the first one for a model without a batch.
        examples: Dict[str, Any] = {
            value.name: array[:EXAMPLES] if subject.batched else array for value, array in values
        }
        np.savez(folder / name / EXAMPLE, **examples)
        described[name] = {
            "model": files[name],
            "inputs": describe(subject.inputs, inputs, subject),
            "outputs": describe(subject.outputs, outputs, subject),
            "batched": subject.batched,
            "preprocessing": dict(subject.preprocessing),
            "checked": checked[name].figures(),
        }
    return {**described.get(WHOLE, {"parts": described}), "checked": together}


def check_served(parts: Parts, tools: Tools, url: str, exported: Path) -> Dict[str, Any]:
    """Check a served model on the evaluation set, over HTTP; return the result.

    Raises:
        Problem: no answer from the server, a rejected request, or outputs that differ by more than the tolerance.
    """
    try:
        served = {}
        for name, subject in parts.subjects.items():
            server = client.Server(url, "http", client.read_manifest(exported / name))
            server.wait(READY_SECONDS)
            served[name] = by_position(subject, partial(client.predict, server))
        checked, together = check(parts, served, tools)
    except client.RefusedError as error:
        raise Problem(str(error), "a server with this model", "see the server's log", FAILED) from None
    if list(checked) == [WHOLE]:
        return together
    return {"parts": {name: model.figures() for name, model in checked.items()}, **together}


def main(
    description: Optional[str], config_class: Any, tools: Tools, prepare: Prepare, read: Read = newest
) -> NoReturn:
    """Run an export.py command line: the last line of its output is the manifest or a problem.

    ``read``: needed if the model to export is not the final one of the run.
    """
    end_process(lambda: _main(description, config_class, tools, prepare, read))


def _arguments(description: Optional[str], formats: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, required=True, help="experiment folder, with checkpoint/")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prepared data set")
    parser.add_argument("-o", "--output", type=Path, help="an empty folder")
    parser.add_argument("--format", choices=formats, default=formats[0])
    parser.add_argument("--facts", type=json.loads, default={}, help="fields for the manifest (JSON)")
    parser.add_argument("--below-target", action="store_true", help="export a model that did not reach its target")
    parser.add_argument("--through", metavar="URL", help="HOST:PORT of a server: check the model there, write nothing")
    parser.add_argument("--exported", type=Path, metavar="DIR", help="with --through: folder of the served model")
    arguments = parser.parse_args()
    if (arguments.output is None) == (arguments.through is None) or (arguments.through and not arguments.exported):
        parser.error("expected -o DIR, or --through URL with --exported DIR")
    return arguments


def _main(description: Optional[str], config_class: Any, tools: Tools, prepare: Prepare, read: Read) -> int:
    arguments = _arguments(description, list(tools.writers))
    try:
        config = configuration.load(config_class, arguments.experiment / "config.json")
        state, saved = read(arguments.experiment, tools.module)
        quality = evaluated(arguments.experiment, state)
        # As in Timeline; an unmeasured quality does not reach its target.
        meets = operator.le if getattr(config, "lower_is_better", False) else operator.ge
        reached = all(name in quality and meets(quality[name], goal) for name, goal in config.targets.items())
        if arguments.through is None and not (arguments.below_target or reached):
            measured, target = (
                ", ".join(f"{name} {values[name]:.5g}" for name in config.targets if name in values)
                for values in (quality, config.targets)
            )
            raise Problem(
                f"the model did not reach its target: {measured or 'it was not evaluated'}",
                target,
                "train until it does, or export it anyway with --below-target",
            )
        data = manifest.read(arguments.data)
        parts = as_parts(prepare(on_cpu(config), saved, arguments.data))
        if arguments.through is not None:
            content = check_served(parts, tools, arguments.through, arguments.exported)
        else:
            content = {
                "schema": SCHEMA,
                **arguments.facts,
                "format": arguments.format,
                **export(parts, tools, arguments.format, arguments.output),
                "data": {"name": data["name"], "id": data["id"]},
                "step": state["step"],
                "quality": quality,
                "reached": reached,
            }
            write_manifests(content, arguments.output)
    except Problem as problem:
        print(problem, file=sys.stderr)
        print(json.dumps({"problem": problem.as_dict()}))
        return problem.code
    print(json.dumps(content))
    return 0


def write_manifests(content: Mapping[str, Any], folder: Path) -> None:
    """Write export.json for the model, or for all parts, called NAME-PART, and the model."""
    shared = {name: value for name, value in content.items() if name != "parts"}
    for part, fields in content.get("parts", {}).items():
        _write({**shared, **fields, "name": f"{content['name']}-{part}"}, folder / part)
    _write({**content, "parts": list(content["parts"])} if "parts" in content else content, folder)


def _write(content: Mapping[str, Any], folder: Path) -> None:
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
