"""A decoder's step that was exported: one hypothesis of a sentence alone, next to the same among others.

python exported_step.py DIR/decoder: with the Python of the model's framework, or of `encore serve` for ONNX.
"""

import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.common.serving.model import OPENERS

OF_SENTENCES = ("source", "memory", "context", "keys")


def alone(name: str, values: np.ndarray) -> np.ndarray:
    """Return what is the last hypothesis's of the first sentence."""
    return values[:1] if name in OF_SENTENCES else values[:1, -1:]


folder = Path(sys.argv[1])
passport = json.loads((folder / "export.json").read_text(encoding="utf-8"))
example = dict(np.load(folder / "example.npz"))
inputs, outputs = ([each["name"] for each in passport[kind]] for kind in ("inputs", "outputs"))
run = OPENERS[passport["format"]](folder / passport["model"], outputs, "cpu")
found = run({name: alone(name, example[name]) for name in inputs})
probabilities = example["log_probabilities"]
report = {
    "hypotheses": probabilities.shape[1],
    "past": {name: list(example[name].shape) for name in inputs},
    "apart": float(np.abs(probabilities[:, 0] - probabilities[:, -1]).max()),
    "largest": max(float(np.abs(found[name] - alone(name, example[name])).max()) for name in outputs),
}
print(json.dumps(report))
