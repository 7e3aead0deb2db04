"""Model files: named weights and network architecture; numpy only.

A model file is a NumPy archive with an array per weight and ``shape``, a line of JSON. Runs write one per
generation; target models, initial weights and models of ``encore play`` have this format. Runs' files also have
momenta and the number of steps, to continue in another run.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Tuple

import numpy as np

from benchmarks.common.data import text_files
from benchmarks.common.data.files import in_one_step
from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import FEATURES

SHAPE, STEPS, MOMENTA = "shape", "steps", "momenta/"
BLACK_TO_PLAY = {"agz": 16, "mlperf07": 8}  # The plane that is 1 where black is to move
POLICY_CHANNELS = 2
VALUE_CHANNELS = 1
PLANES = FEATURES
HINT = "name a model of a run (models/*.npz in its folder) or MLPerf's frozen graph (target.pb, target.minigo.tf)"
Arrays = Dict[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Shape:
    """Network architecture, with the names of the reference's flags (dual_net.py)."""

    board_size: int
    features: str
    conv_width: int
    trunk_layers: int
    fc_width: int
    # Whether the value head predicts the outcome for black, as in the reference, not for the player to move
    black_value: bool = False

    @classmethod
    def of(cls, config: Any, black_value: bool = False) -> "Shape":
        width, layers, hidden = config.conv_width, config.trunk_layers, config.fc_width
        return cls(config.board_size, config.features, width, layers, hidden, black_value)


def unreadable(path: Path, reason: str) -> Problem:
    return Problem(f"{path} cannot be read as a model: {reason}", "a network's weights, or a frozen graph", HINT)


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


def is_archive(path: Path) -> bool:
    """Return whether a file is a NumPy archive, complete or damaged, like models of runs."""
    return read_bytes(path)[:2] == b"PK"


def check_board(path: Path, size: int, expected_size: int) -> None:
    """Raise Problem if a model is for a different board size; 0: any."""
    if expected_size not in (0, size):
        raise Problem(
            f"{path} is a model for {size} x {size}",
            f"one for {expected_size} x {expected_size}",
            "use another model, or set board_size",
        )


class Start(NamedTuple):
    shape: Shape
    arrays: Arrays
    momenta: Arrays  # By the names of the weights; without any they are zeros
    steps: int  # That the weights were trained for: where the learning rate continues


def weight_shapes(shape: Shape) -> Dict[str, Tuple[int, ...]]:
    """Return the shapes of all arrays in the order of the network: (height, width, in, out), dense (in, out)."""
    width, points = shape.conv_width, shape.board_size**2
    array_shapes: Dict[str, Tuple[int, ...]] = {}

    def conv_norm(name: str, size: int, channels: int, filters: int, scaled: bool = True) -> None:
        array_shapes[f"{name}.weight"] = (size, size, channels, filters)
        parts = ("gamma", "beta", "mean", "variance") if scaled else ("mean", "variance")
        array_shapes.update({f"{name}.{part}": (filters,) for part in parts})

    conv_norm("stem", 3, PLANES[shape.features], width)
    for block in range(shape.trunk_layers):
        conv_norm(f"block{block}.1", 3, width, width)
        conv_norm(f"block{block}.2", 3, width, width)
    conv_norm("policy", 1, width, POLICY_CHANNELS, scaled=False)
    array_shapes.update(
        {"policy_dense.weight": (POLICY_CHANNELS * points, points + 1), "policy_dense.bias": (points + 1,)}
    )
    conv_norm("value", 1, width, VALUE_CHANNELS, scaled=False)
    return {
        **array_shapes,
        "value_hidden.weight": (VALUE_CHANNELS * points, shape.fc_width),
        "value_hidden.bias": (shape.fc_width,),
        "value_dense.weight": (shape.fc_width, 1),
        "value_dense.bias": (1,),
    }


def initial_weights(shape: Shape, seed: int) -> Arrays:
    """Initialize weights like TensorFlow's layers: Glorot and Bengio 2010, uniform."""
    generator = np.random.RandomState(seed % 2**32)

    def draw(name: str, size: Tuple[int, ...]) -> Any:
        if not name.endswith("weight"):
            fill = np.ones if name.endswith(("gamma", "variance")) else np.zeros
            return fill(size, np.float32)
        field = int(np.prod(size[:-2]))
        limit = np.sqrt(6.0 / (field * (size[-2] + size[-1])))
        return generator.uniform(-limit, limit, size).astype(np.float32)

    return {name: draw(name, size) for name, size in weight_shapes(shape).items()}


def save(path: Path, shape: Shape, arrays: Mapping[str, Any]) -> None:
    """Write a model file atomically."""
    with in_one_step(path, durable=True) as file:
        text = np.frombuffer(json.dumps(asdict(shape)).encode(), np.uint8)
        np.savez(file, **{SHAPE: text, **arrays})


def load(path: Path, board_size: int = 0) -> Tuple[Shape, Arrays]:
    """Read a model file; raises Problem if it is invalid, damaged, or for a board size other than ``board_size``."""
    try:
        with np.load(str(path)) as archive:
            shape = Shape(**json.loads(archive[SHAPE].tobytes().decode()))
            arrays = {name: archive[name] for name in weight_shapes(shape)}
    except (OSError, ValueError, KeyError, TypeError, *text_files.DAMAGED) as error:
        raise unreadable(path, str(error) or type(error).__name__) from None
    for name, size in weight_shapes(shape).items():
        if arrays[name].shape != size:
            raise Problem(f"{path}: {name} has shape {arrays[name].shape}", f"{size}", HINT)
    check_board(path, shape.board_size, board_size)
    return shape, arrays


def load_start(path: Path, board_size: int) -> Start:
    """Read a model file as a run's initial state; without momenta and steps the run starts at step 0."""
    shape, arrays = load(path, board_size)
    with np.load(str(path)) as archive:
        momenta = {name[len(MOMENTA) :]: archive[name] for name in archive.files if name.startswith(MOMENTA)}
        return Start(shape, arrays, momenta, int(archive[STEPS]) if STEPS in archive.files else 0)
