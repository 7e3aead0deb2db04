"""Ask Triton Inference Server about the samples in example.npz, and compare its outputs with those stored there.

    pip install "tritonclient[http,grpc]" numpy
    python client.py --url localhost:8000
    python client.py --url localhost:8001 --protocol grpc

example.npz and export.json are looked for next to this file. Ends with 0 if each output is within the tolerance of
export.json, with 1 if not, and with 2 if the server does not answer or refuses the samples.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

HERE = Path(__file__).resolve().parent
POLL_SECONDS = 0.2
SHOWN = 4
"""Values of each output that are printed."""

Arrays = Dict[str, np.ndarray]


class RefusedError(Exception):
    """What the server said, in a line."""


class Server:
    """A model of a server over HTTP or gRPC."""

    def __init__(self, url: str, protocol: str, passport: Dict[str, Any]) -> None:
        if protocol == "grpc":
            import tritonclient.grpc as triton
        else:
            import tritonclient.http as triton
        self.triton = triton
        self.url, self.passport = url, passport
        self.client = triton.InferenceServerClient(url)

    def is_ready(self) -> bool:
        """Return whether the server answers and has loaded the model."""
        try:
            return bool(self.client.is_model_ready(self.passport["name"]))
        # A refused connection has another class in each protocol.
        except Exception:
            return False

    def wait(self, seconds: float) -> None:
        """Return once the model is ready; RefusedError after ``seconds``."""
        end = time.monotonic() + seconds
        while not self.is_ready():
            if time.monotonic() > end:
                name = self.passport["name"]
                raise RefusedError(f"model {name} of {self.url} is not ready after {seconds:g} s: is the server up?")
            time.sleep(POLL_SECONDS)

    def settings(self) -> Dict[str, Any]:
        """Return the model's configuration, with its largest batch and the sizes that it expects."""
        if hasattr(self.triton, "service_pb2"):
            return self.client.get_model_config(self.passport["name"], as_json=True)["config"]
        return self.client.get_model_config(self.passport["name"])

    def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs for one request; RefusedError with the server's words."""
        sent = []
        for each in self.passport["inputs"]:
            values = inputs[each["name"]]
            tensor = self.triton.InferInput(each["name"], list(values.shape), each["type"])
            try:
                tensor.set_data_from_numpy(values)
            except Exception as error:
                raise RefusedError(str(error)) from None
            sent.append(tensor)
        wanted = [self.triton.InferRequestedOutput(each["name"]) for each in self.passport["outputs"]]
        try:
            answer = self.client.infer(self.passport["name"], sent, outputs=wanted)
        except Exception as error:
            raise RefusedError(str(error)) from None
        return {each["name"]: answer.as_numpy(each["name"]) for each in self.passport["outputs"]}


def as_sent(passport: Dict[str, Any], settings: Dict[str, Any], inputs: Arrays) -> Arrays:
    """Return the inputs as the server takes them: a single value of a sample is one of size 1."""
    if not largest_batch(settings):
        return inputs
    return {name: each.reshape(-1, 1) if each.ndim == 1 else each for name, each in inputs.items()}


def largest_batch(settings: Dict[str, Any]) -> int:
    """Return how many samples a request may have; 0 for a model without batches."""
    return int(settings.get("max_batch_size", 0))


def predict(server: Server, example: Arrays) -> Arrays:
    """Return the outputs for the example's samples, in as many requests as the server's largest batch needs."""
    passport, settings = server.passport, server.settings()
    inputs = {each["name"]: example[each["name"]] for each in passport["inputs"]}
    inputs = as_sent(passport, settings, inputs)
    samples = len(next(iter(inputs.values())))
    step = largest_batch(settings) or max(samples, 1)
    starts = range(0, samples, step) if largest_batch(settings) else [0]
    answers: List[Arrays] = []
    for start in starts:
        batch = slice(start, start + step) if largest_batch(settings) else slice(None)
        answers.append(server.ask({name: each[batch] for name, each in inputs.items()}))
    joined = {name: np.concatenate([each[name] for each in answers]) for name in answers[0]} if step < samples else {}
    return {name: each.reshape(example[name].shape) for name, each in (joined or answers[0]).items()}


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, divided by the largest magnitude of ``expected`` if that is above 1.

    `encore export` compares in the same way. Numbers that are not finite differ by infinity where they differ at all.
    """
    if found.size == 0:
        return 0.0
    one, other = found.astype(np.float64), expected.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart = np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))
    magnitudes = np.abs(other[np.isfinite(other)])
    return float(apart.max() / max(1.0, magnitudes.max() if magnitudes.size else 0.0))


def compare(server: Server, example: Arrays) -> Dict[str, Any]:
    """Return the largest difference of each output from the example's, and whether all are within the tolerance."""
    found = predict(server, example)
    tolerance = float(server.passport.get("checked", {}).get("tolerance", 0.0))
    differences = {name: difference(each, example[name]) for name, each in found.items()}
    return {
        "samples": len(next(iter(example.values()))),
        "differences": differences,
        "tolerance": tolerance,
        "same": all(each <= tolerance for each in differences.values()),
        "first": {name: [float(each) for each in values.ravel()[:SHOWN]] for name, values in found.items()},
    }


def load(folder: Path) -> "tuple[Dict[str, Any], Arrays]":
    """Return export.json and the arrays of example.npz."""
    passport = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    with np.load(folder / "example.npz", allow_pickle=False) as stored:
        return passport, {name: stored[name] for name in stored.files}


def options(parser: argparse.ArgumentParser) -> None:
    """Add what names a server and an example."""
    parser.add_argument("--url", default="localhost:8000", help="HOST:PORT of the protocol; default: %(default)s")
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds for the model to become ready")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of export.json and example.npz")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Ask, print and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    passport, example = load(args.folder)
    try:
        server = Server(args.url, args.protocol, passport)
        server.wait(args.wait)
        compared = compare(server, example)
    except (RefusedError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(compared))
    else:
        for name, largest in compared["differences"].items():
            values = " ".join(f"{each:g}" for each in compared["first"][name])
            print(f"{name}: {values} ...  largest difference {largest:g}")
        print(f"{compared['samples']} samples, tolerance {compared['tolerance']:g}: ", end="")
        print("the same outputs" if compared["same"] else "OTHER OUTPUTS")
    return 0 if compared["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
