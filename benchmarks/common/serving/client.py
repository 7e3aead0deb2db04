"""Send the samples of example.npz to Triton Inference Server and compare the outputs with the stored ones.

    pip install "tritonclient[http,grpc]" numpy
    python client.py --url localhost:8000
    python client.py --url localhost:8001 --protocol grpc
    python client.py --inputs own.npz --outputs found.npz

example.npz and export.json are expected in the folder of this file, or in one folder per part. Exit code 0: all
outputs are within the tolerance of export.json; 1: they are not; 2: no answer, or the server rejected the samples.
--inputs has arrays by the names in export.json, which documents their meaning and ``preprocessing``.
"""

import argparse
import contextlib
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np

HERE = Path(__file__).resolve().parent
POLL_SECONDS = 0.2
SHOWN = 4  # number of printed values per output

Arrays = Dict[str, np.ndarray]


class RefusedError(Exception):
    pass


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Convert all exceptions of the client library to RefusedError with the server's message."""
    try:
        yield
    except Exception as error:
        raise RefusedError(str(error)) from None


class Server:
    """A served model over HTTP or gRPC."""

    def __init__(self, url: str, protocol: str, manifest: Dict[str, Any]) -> None:
        if protocol == "grpc":
            import tritonclient.grpc as triton
        else:
            import tritonclient.http as triton
        self.triton, self.url, self.manifest = triton, url, manifest
        self.client = triton.InferenceServerClient(url)
        self.known: Dict[str, Any] = {}

    def wait(self, seconds: float) -> None:
        """Wait until the model is ready; raise RefusedError after ``seconds``."""
        name, end = self.manifest["name"], time.monotonic() + seconds
        while True:
            # The exception for a refused connection depends on the protocol.
            with contextlib.suppress(Exception):
                if self.client.is_model_ready(name):
                    return
            if time.monotonic() > end:
                raise RefusedError(f"model {name} of {self.url} is not ready after {seconds:g} s: is the server up?")
            time.sleep(POLL_SECONDS)

    def settings(self) -> Dict[str, Any]:
        """Return the model configuration, with maximum batch and input sizes; cached."""
        if not self.known:
            with refusals():
                options = {"as_json": True} if hasattr(self.triton, "service_pb2") else {}
                answer = self.client.get_model_config(self.manifest["name"], **options)
            self.known = answer["config"] if options else answer
        return self.known

    def ask(self, inputs: Arrays) -> Arrays:
        """Return the outputs from one request; raise RefusedError with the server's message."""
        names = [tensor["name"] for tensor in self.manifest["outputs"]]
        arrays = [(tensor["name"], tensor["type"], inputs[tensor["name"]]) for tensor in self.manifest["inputs"]]
        sent = []
        with refusals():
            for name, kind, values in arrays:
                sent.append(self.triton.InferInput(name, list(values.shape), kind))
                sent[-1].set_data_from_numpy(values)
            requested = [self.triton.InferRequestedOutput(name) for name in names]
            answer = self.client.infer(self.manifest["name"], sent, outputs=requested)
        return {name: answer.as_numpy(name) for name in names}


def to_request(settings: Dict[str, Any], inputs: Arrays) -> Arrays:
    """Convert inputs to the server's shapes: a scalar, per sample or overall, has an axis of size 1."""
    single = 1 if largest_batch(settings) else 0
    return {name: array[..., np.newaxis] if array.ndim == single else array for name, array in inputs.items()}


def from_response(manifest: Dict[str, Any], settings: Dict[str, Any], outputs: Arrays) -> Arrays:
    """Convert the server's outputs to the shapes of the exported model."""
    single = 1 if largest_batch(settings) else 0
    ranks = {array["name"]: len(array["shape"]) for array in manifest["outputs"]}
    return {name: array[..., 0] if ranks[name] == single < array.ndim else array for name, array in outputs.items()}


def largest_batch(settings: Dict[str, Any]) -> int:
    """Return the maximum batch per request; 0 for a model without batches."""
    return int(settings.get("max_batch_size", 0))


def predict(server: Server, example: Arrays) -> Arrays:
    """Return the outputs for ``example``, split into requests of the maximum batch."""
    manifest, settings = server.manifest, server.settings()
    inputs = to_request(settings, {array["name"]: example[array["name"]] for array in manifest["inputs"]})
    largest = largest_batch(settings)
    if not largest:
        return from_response(manifest, settings, server.ask(inputs))
    answers: List[Arrays] = []
    for start in range(0, max(len(next(iter(inputs.values()))), 1), largest):
        answers.append(server.ask({name: array[start : start + largest] for name, array in inputs.items()}))
    joined = {name: np.concatenate([array[name] for array in answers]) for name in answers[0]}
    return from_response(manifest, settings, joined)


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, divided by the largest magnitude of ``expected`` if that is above 1.

    `encore export` compares in the same way. Numbers that are not finite differ by infinity where they differ at all.
    """
    if actual.size == 0:
        return 0.0
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart = np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))
    magnitudes = np.abs(b[np.isfinite(b)])
    return float(apart.max() / max(1.0, magnitudes.max() if magnitudes.size else 0.0))


def compare(server: Server, example: Arrays) -> Dict[str, Any]:
    """Return the largest difference per output, and whether all are within the tolerance."""
    outputs = predict(server, example)
    tolerance = float(server.manifest.get("checked", {}).get("tolerance", 0.0))
    differences = {name: difference(output, example[name]) for name, output in outputs.items()}
    return {
        "model": server.manifest["name"],
        "samples": len(next(iter(example.values()))),
        "differences": differences,
        "tolerance": tolerance,
        "same": all(output <= tolerance for output in differences.values()),
        "first": {name: [float(output) for output in values.ravel()[:SHOWN]] for name, values in outputs.items()},
    }


def read_manifest(folder: Path) -> Dict[str, Any]:
    return json.loads((folder / "export.json").read_text(encoding="utf-8"))


def models(folder: Path) -> List[Path]:
    return [folder / part for part in read_manifest(folder).get("parts", [])] or [folder]


def load(folder: Path) -> "tuple[Dict[str, Any], Arrays]":
    """Return export.json and the arrays of example.npz."""
    with np.load(folder / "example.npz", allow_pickle=False) as stored:
        return read_manifest(folder), {name: stored[name] for name in stored.files}


def send(server: Server, path: Path, target: Optional[Path]) -> None:
    """Send the user's inputs; write the outputs, or print their first values."""
    names = [number["name"] for number in server.manifest["inputs"]]
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names if name in stored.files}
    # np.load returns a plain array, not a context manager, for np.save files.
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise RefusedError(f"{path} is not a file of arrays: {error}") from None
    missing = [name for name in names if name not in arrays]
    if missing:
        raise RefusedError(f"{path} has no {', '.join(missing)}: expected {', '.join(names)}")
    outputs = predict(server, arrays)
    if target is not None:
        try:
            np.savez(target, **outputs)  # type: ignore[arg-type]
        except OSError as error:
            raise RefusedError(f"{target} cannot be written: {error.strerror}") from None
    for name, values in outputs.items():
        preview = " ".join(f"{number:g}" for number in values.ravel()[:SHOWN])
        print(f"{name} {list(values.shape)}: {preview} ...")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="localhost:8000", help="HOST:PORT of the server; default: %(default)s")
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds for the model to become ready")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of export.json and example.npz")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--inputs", type=Path, metavar="NPZ", help="inputs to send, by name")
    parser.add_argument("--outputs", type=Path, metavar="NPZ", help="with --inputs: file for the outputs")
    args = parser.parse_args(arguments)
    if args.inputs is None and args.outputs is not None:
        parser.error("--outputs needs --inputs")
    if args.inputs is not None and args.json:
        parser.error("--json applies to the comparison with the example: omit --inputs")
    try:
        folders = models(args.folder)
        if args.inputs is not None:
            if len(folders) > 1:
                raise RefusedError(f"{args.folder} is of several models: --folder {folders[0]} names one")
            send(connect(folders[0], args), args.inputs, args.outputs)
            return 0
        compared = [compare(connect(folder, args), load(folder)[1]) for folder in folders]
    except (RefusedError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(compared))
    else:
        for comparison in compared:
            show(comparison)
    return 0 if all(comparison["same"] for comparison in compared) else 1


def connect(folder: Path, args: argparse.Namespace) -> Server:
    server = Server(args.url, args.protocol, read_manifest(folder))
    server.wait(args.wait)
    return server


def show(compared: Dict[str, Any]) -> None:
    for name, largest in compared["differences"].items():
        values = " ".join(f"{number:g}" for number in compared["first"][name])
        print(f"{name}: {values} ...  largest difference {largest:g}")
    print(f"{compared['model']}: {compared['samples']} samples, tolerance {compared['tolerance']:g}: ", end="")
    print("the same outputs" if compared["same"] else "OTHER OUTPUTS")


if __name__ == "__main__":
    sys.exit(main())
