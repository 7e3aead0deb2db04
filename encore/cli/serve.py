"""``encore serve``: an exported model in Triton Inference Server."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typing_extensions import NotRequired, TypedDict

from encore.cli import options
from encore.cli.layout import console, say, show, text, write_json
from encore.environment import ensure_environment
from encore.errors import EncoreError, ExitCode
from encore.lab.serving import export as exports
from encore.lab.serving import repository as repositories
from encore.lab.serving import server
from encore.lab.serving.export import Model
from encore.lab.serving.repository import Repository, Settings, config_text
from encore.lab.serving.server import Deployment, Ports
from encore.machine import node


class PlannedModel(TypedDict):
    model: str
    version: int
    config: str  # Its config.pbtxt


class ServePlan(TypedDict):
    """A server that is not started."""

    repository: str  # Folder of the model repository
    models: list[PlannedModel]
    backend: str
    image: str
    command: tuple[str, ...]
    problem: str  # Why it cannot be started here; else empty


class ServedModel(TypedDict):
    """A model's outputs through the server, next to those of its export."""

    model: str
    samples: int
    differences: dict[str, float]  # The largest, by output
    tolerance: float
    same: bool  # Whether all are within the tolerance
    first: dict[str, list[float]]  # The first numbers of each output


class ServedSpeed(TypedDict):
    """Throughput and latency of one grid cell."""

    model: str
    batch: int  # Samples of a request
    clients: int  # At a time
    server: dict[str, float]  # ``requests_per_second``, ``p50_ms``, ``p90_ms``, ``p99_ms``
    direct: NotRequired[dict[str, float]]  # The same of ONNX Runtime called directly
    ratio: NotRequired[float]  # Of the two numbers of requests


class Served(TypedDict):
    """What was asked of the server."""

    check: dict[str, list[ServedModel]]  # By protocol: http and grpc
    evaluation: NotRequired[dict[str, Any]]  # The evaluation set of the model's run through the server
    bench: NotRequired[list[ServedSpeed]]


def serve(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="An exported model: a folder of `encore export`.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of the model repository; default: DIR/triton."),
    ] = None,
    runtime: Annotated[Literal["docker", "podman", "host"], typer.Option(help="What the server runs in.")] = "docker",
    device: Annotated[Literal["cpu", "gpu"] | None, typer.Option(help="Default: cpu on the host, else gpu.")] = None,
    image: Annotated[str | None, typer.Option(help="Image in place of NGC's.")] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Python with nvidia-pytriton and tritonclient.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Samples that the server puts together.")] = 32,
    max_queue_delay_microseconds: Annotated[int, typer.Option(min=0, help="Wait for more requests.")] = 100,
    instance_count: Annotated[int, typer.Option(min=1, help="Instances of the model on each GPU.")] = 1,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0: no metrics.")] = 8002,
    ready_seconds: Annotated[float, typer.Option(min=1.0, help="Time to load the model.")] = 300.0,
    check: Annotated[bool, typer.Option("--check", help="Ask over HTTP and gRPC, compare, and end.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure throughput and latency, and end.")] = False,
    run: Annotated[
        Path | None,
        typer.Option("--evaluate", metavar="RUN", help="Pass the evaluation set of the model's run through, and end."),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="With --evaluate: the run's data set; default: where the run had it.")
    ] = None,
    batches: Annotated[str, typer.Option(help="With --bench: samples of a request.")] = "1,8",
    clients: Annotated[str, typer.Option(help="With --bench: clients at a time.")] = "1,4",
    requests: Annotated[int, typer.Option(min=1, help="With --bench: requests of each measurement.")] = 200,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Serve an exported model: write a model repository, and start Triton Inference Server on it.

    Examples:

      encore serve DIR --dry-run

      encore serve DIR -o /models/resnet --runtime docker

      encore serve DIR --runtime host --check

      encore serve DIR --runtime host --evaluate results/20260101T120000Z-ncf-pytorch-cpu

      encore serve DIR --runtime host --bench --batches 1,8,32 --clients 1,4

    DIR is what `encore export` wrote. See docs/serving.md.
    """
    screen = console(stderr=as_json)
    models = exports.read(source)

    def on_step(words: str) -> None:
        say(screen, text(words))

    settings = Settings(
        max_batch=max_batch_size,
        delay_us=max_queue_delay_microseconds,
        instances=instance_count,
        device=device or ("cpu" if runtime == "host" else "gpu"),
    )
    ports = Ports(http_port, grpc_port, metrics_port)
    sizes, at_once = options.numbers("--batches", batches), options.numbers("--clients", clients)
    target = (output or source / "triton").absolute()
    planned = [repositories.plan(model, target) for model in models]
    no_gpu = EncoreError("no GPU on this machine", hint="--device cpu")
    lacks_gpu = settings.device == "gpu" and not dry_run and not node.gpus()
    # Parts have one format and one framework.
    export, first = models[0].export, planned[0]
    if runtime == "host":
        if lacks_gpu:
            raise no_gpu
        place = server.on_host(export, first, ports, python, None if dry_run else lambda words: say(screen, words))
    else:
        place = server.in_container(runtime, export, first, settings, ports, image)
    if dry_run:
        _show(screen, models, planned, settings, place, as_json)
        return
    if place.problem is not None:
        raise place.problem
    if lacks_gpu:
        raise no_gpu
    evaluation = None if run is None else exports.plan(source, run, data_folder)
    repositories.write(source, models, planned, place.backend, settings)
    server.link_backend(place, first)
    for each in planned:
        say(screen, f"model repository: {each.models} ({each.name}, version {each.version})")
    log = target / "server.log"
    found: dict[str, Any] = {}
    with server.running(place.command, ports, [each.name for each in planned], log, ready_seconds) as child:
        say(screen, f"ready: http 127.0.0.1:{ports.http}, grpc 127.0.0.1:{ports.grpc}; output in {log}")
        if check or bench or evaluation:
            client = python or ensure_environment(exports.ENVIRONMENT, on_step)
            found["check"] = server.ask(client, target, ports)
            if evaluation:
                found["evaluation"] = exports.evaluate(evaluation, f"127.0.0.1:{ports.http}", on_step)
            if bench:
                folders = [repositories.client_folder(source, model, target) for model in models]
                found["bench"] = [
                    cell
                    for model, folder in zip(models, folders, strict=True)
                    for cell in server.measure(client, model, folder, ports, sizes, at_once, requests)
                ]
        else:
            say(screen, shlex.join(["python", str(target / "client.py"), "--url", f"127.0.0.1:{http_port}"]))
            with suppress(KeyboardInterrupt):
                child.wait()
                raise server.explain(log, f"the server ended with exit code {child.returncode}")
    if found:
        _report(screen, found, as_json)


def _show(
    screen: Console, models: Sequence[Model], planned: Sequence[Repository], settings: Settings, place: Deployment,
    as_json: bool,
) -> None:  # fmt: skip
    configs = [
        config_text(each.export, place.backend, settings, exports.example_inputs(each.folder, each.export))
        for each in models
    ]
    if as_json:
        content: ServePlan = {
            "repository": str(planned[0].models),
            "models": [
                {"model": each.name, "version": each.version, "config": config}
                for each, config in zip(planned, configs, strict=True)
            ],
            "backend": place.backend.name, "image": place.image,
            "command": place.command.argv, "problem": str(place.problem or ""),
        }  # fmt: skip
        write_json("serve-plan", content)
        return
    for each, config in zip(planned, configs, strict=True):
        say(screen, f"would write {each.models}: {each.name}, version {each.version}, with config.pbtxt:")
        screen.print(config, markup=False, highlight=False, soft_wrap=True)
    if place.runtime == "host":
        # Its paths are relative to it.
        folder = shlex.join(["cd", str(place.command.working_directory)])
        screen.print(folder, markup=False, highlight=False, soft_wrap=True)
    screen.print(shlex.join(place.command.argv), markup=False, highlight=False, soft_wrap=True)
    if place.problem is not None:
        say(screen, "[yellow]cannot be started here[/]:", text(place.problem.found))
        say(screen, text(f"hint: {place.problem.hint}"))


def _report(screen: Console, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json("served", found)
    else:
        _print(screen, found)
    if not all(each["same"] for checked in found["check"].values() for each in checked):
        raise EncoreError("the server's outputs differ from the export's", exit_code=ExitCode.FAILED)


def _print(screen: Console, found: dict[str, Any]) -> None:
    for protocol, models in found["check"].items():
        for each in models:
            largest = max(each["differences"].values())
            verdict = "[green]the same outputs[/]" if each["same"] else "[red]other outputs[/]"
            say(screen, f"{protocol}, {each['model']}: {each['samples']} samples, {verdict}: "
                f"largest difference {largest:.3g}, tolerance {each['tolerance']:.3g}")  # fmt: skip
    if "evaluation" in found:
        evaluated = found["evaluation"]
        for part, each in evaluated.get("parts", {"evaluation set": evaluated}).items():
            say(screen, f"{part} through the server: {each['samples']} samples, largest difference "
                f"{each['largest_difference']:.3g}, tolerance {each['tolerance']:.3g}")  # fmt: skip
        for name, value in evaluated.get("quality", {}).items():
            say(screen, text(f"{name} through the server: {value:.5g}"))
    columns = ("batch", "clients", "requests/s", "p50 ms", "p90 ms", "p99 ms", "directly", "ratio")
    for model, cells in groupby(found.get("bench", []), key=lambda cell: str(cell["model"])):
        rows = []
        for cell in cells:
            through, direct = cell["server"], cell.get("direct")
            latencies = [f"{through[f'p{each}_ms']:.2f}" for each in (50, 90, 99)]
            last = [f"{direct['requests_per_second']:.1f}", f"{cell['ratio']:.2g}"] if direct else ["", ""]
            rows.append((cell["batch"], cell["clients"], f"{through['requests_per_second']:.1f}", *latencies, *last))
        title = f"{model} through the server, and called directly"
        show(screen, title, columns, rows, numbers=columns, least=("p90 ms",))
