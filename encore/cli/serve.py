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
    config: str  # Text of config.pbtxt


class ServePlan(TypedDict):
    """A server that is not started."""

    repository: str  # Folder of the model repository
    models: list[PlannedModel]
    backend: str
    image: str
    command: tuple[str, ...]
    problem: str  # Reason why the server cannot be started; empty if it can


class ServedModel(TypedDict):
    """Outputs of the served model compared with the export."""

    model: str
    samples: int
    differences: dict[str, float]  # The largest, by output
    tolerance: float
    same: bool  # Whether all are within the tolerance
    first: dict[str, list[float]]  # First values of every output


class ServedSpeed(TypedDict):
    """Throughput and latency of one grid cell."""

    model: str
    batch: int  # Samples per request
    clients: int  # At a time
    server: dict[str, float]  # ``requests_per_second``, ``p50_ms``, ``p90_ms``, ``p99_ms``
    direct: NotRequired[dict[str, float]]  # The same of ONNX Runtime called directly
    ratio: NotRequired[float]  # Of the two numbers of requests


class Served(TypedDict):
    """Results of the requested checks and measurements."""

    check: dict[str, list[ServedModel]]  # By protocol: http and grpc
    evaluation: NotRequired[dict[str, Any]]  # The evaluation set of the model's run through the server
    bench: NotRequired[list[ServedSpeed]]


def serve(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="An exported model: a folder of `encore export`.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of the model repository; default: DIR/triton."),
    ] = None,
    runtime: Annotated[Literal["docker", "podman", "host"], typer.Option(help="Runtime of the server.")] = "docker",
    device: Annotated[
        Literal["cpu", "gpu"] | None, typer.Option(help="Default: cpu with --runtime host, gpu otherwise.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image to use instead of NGC's.")] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Python with nvidia-pytriton and tritonclient.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Maximum batch size of the server.")] = 32,
    max_queue_delay_microseconds: Annotated[int, typer.Option(min=0, help="Wait this long for more requests.")] = 100,
    instance_count: Annotated[int, typer.Option(min=1, help="Number of model instances per GPU.")] = 1,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0: no metrics.")] = 8002,
    ready_seconds: Annotated[float, typer.Option(min=1.0, help="Time to load the model.")] = 300.0,
    check: Annotated[
        bool, typer.Option("--check", help="Query over HTTP and gRPC, compare the outputs, and exit.")
    ] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure throughput and latency, and exit.")] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            "--evaluate", metavar="RUN", help="Evaluate the run's evaluation set through the server, and exit."
        ),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="With --evaluate: the run's data set; default: where the run had it.")
    ] = None,
    batches: Annotated[str, typer.Option(help="With --bench: samples per request.")] = "1,8",
    clients: Annotated[str, typer.Option(help="With --bench: concurrent clients.")] = "1,4",
    requests: Annotated[int, typer.Option(min=1, help="With --bench: requests per measurement.")] = 200,
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

    def on_step(message: str) -> None:
        say(screen, text(message))

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
    if settings.device == "gpu" and not dry_run and not node.gpus():
        raise EncoreError("no GPU on this machine", hint="--device cpu")
    # Parts have one format and one framework.
    export, first = models[0].export, planned[0]
    if runtime == "host":
        deployment = server.on_host(export, first, ports, python, None if dry_run else on_step)
    else:
        deployment = server.in_container(runtime, export, first, settings, ports, image)
    if dry_run:
        _show(screen, models, planned, settings, deployment, as_json)
        return
    if deployment.problem is not None:
        raise deployment.problem
    evaluation = None if run is None else exports.plan(source, run, data_folder)
    repositories.write(source, models, planned, deployment.backend, settings)
    server.link_backend(deployment, first)
    for repository in planned:
        say(screen, f"model repository: {repository.models} ({repository.name}, version {repository.version})")
    log = target / "server.log"
    document: dict[str, Any] = {}
    with server.running(
        deployment.command, ports, [repository.name for repository in planned], log, ready_seconds
    ) as child:
        say(screen, f"ready: http 127.0.0.1:{ports.http}, grpc 127.0.0.1:{ports.grpc}; output in {log}")
        if check or bench or evaluation:
            client = python or ensure_environment(exports.ENVIRONMENT, on_step)
            document["check"] = server.ask(client, target, ports)
            if evaluation:
                document["evaluation"] = exports.evaluate(evaluation, f"127.0.0.1:{ports.http}", on_step)
            if bench:
                folders = [repositories.client_folder(source, model, target) for model in models]
                document["bench"] = [
                    cell
                    for model, folder in zip(models, folders, strict=True)
                    for cell in server.measure(client, model, folder, ports, sizes, at_once, requests)
                ]
        else:
            say(screen, shlex.join(["python", str(target / "client.py"), "--url", f"127.0.0.1:{http_port}"]))
            with suppress(KeyboardInterrupt):
                child.wait()
                raise server.explain(log, f"the server stopped with exit code {child.returncode}")
    if document:
        if as_json:
            write_json("served", document)
        else:
            _print(screen, document)
        if not all(result["same"] for checked in document["check"].values() for result in checked):
            raise EncoreError("the server's outputs differ from the export's", exit_code=ExitCode.FAILED)


def _show(
    screen: Console, models: Sequence[Model], planned: Sequence[Repository], settings: Settings, deployment: Deployment,
    as_json: bool,
) -> None:  # fmt: skip
    configs = [
        config_text(model.export, deployment.backend, settings, exports.example_inputs(model.folder, model.export))
        for model in models
    ]
    if as_json:
        write_json(
            "serve-plan",
            ServePlan(
                repository=str(planned[0].models),
                models=[
                    {"model": repository.name, "version": repository.version, "config": config}
                    for repository, config in zip(planned, configs, strict=True)
                ],
                backend=deployment.backend.name,
                image=deployment.image,
                command=deployment.command.argv,
                problem=str(deployment.problem or ""),
            ),
        )
        return
    for repository, config in zip(planned, configs, strict=True):
        say(
            screen,
            f"would write {repository.models}: {repository.name}, version {repository.version}, with config.pbtxt:",
        )
        screen.print(config, markup=False, highlight=False, soft_wrap=True)
    if deployment.runtime == "host":
        # The command contains relative paths.
        folder = shlex.join(["cd", str(deployment.command.working_directory)])
        screen.print(folder, markup=False, highlight=False, soft_wrap=True)
    screen.print(shlex.join(deployment.command.argv), markup=False, highlight=False, soft_wrap=True)
    if deployment.problem is not None:
        say(screen, "[yellow]cannot be started here[/]:", text(deployment.problem.found))
        say(screen, text(f"hint: {deployment.problem.hint}"))


def _print(screen: Console, document: dict[str, Any]) -> None:
    for protocol, models in document["check"].items():
        for check in models:
            largest = max(check["differences"].values())
            verdict = "[green]the same outputs[/]" if check["same"] else "[red]other outputs[/]"
            say(screen, f"{protocol}, {check['model']}: {check['samples']} samples, {verdict}: "
                f"largest difference {largest:.3g}, tolerance {check['tolerance']:.3g}")  # fmt: skip
    if "evaluation" in document:
        evaluated = document["evaluation"]
        for part, check in evaluated.get("parts", {"evaluation set": evaluated}).items():
            say(screen, f"{part} through the server: {check['samples']} samples, largest difference "
                f"{check['largest_difference']:.3g}, tolerance {check['tolerance']:.3g}")  # fmt: skip
        for name, value in evaluated.get("quality", {}).items():
            say(screen, text(f"{name} through the server: {value:.5g}"))
    columns = ("batch", "clients", "requests/s", "p50 ms", "p90 ms", "p99 ms", "directly", "ratio")
    for model, cells in groupby(document.get("bench", []), key=lambda cell: str(cell["model"])):
        rows = []
        for cell in cells:
            through, direct = cell["server"], cell.get("direct")
            latencies = [f"{through[f'p{percentile}_ms']:.2f}" for percentile in (50, 90, 99)]
            last = [f"{direct['requests_per_second']:.1f}", f"{cell['ratio']:.2g}"] if direct else ["", ""]
            rows.append((cell["batch"], cell["clients"], f"{through['requests_per_second']:.1f}", *latencies, *last))
        title = f"{model} through the server, and called directly"
        show(screen, title, columns, rows, numbers=columns, least=("p90 ms",))
