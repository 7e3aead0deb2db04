"""Sweeps: trainings of a benchmark at multiple GPU counts, run on this machine or submitted to Slurm.

from encore.lab.studies.sweep import Sweep, point_request
sweep = Sweep(request=Request(name="resnet", gpus=None), gpus=(1, 2, 4, 8), mode="strong")
for point in sweep.points():
    print(point.key, request_of(sweep, point, Path("results")).settings)
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_serializer

from encore import catalogue, configuration
from encore.catalogue import System
from encore.containers import building, images
from encore.errors import EncoreError, ExitCode
from encore.lab.studies import folder as folders
from encore.lab.studies.folder import Definition, Folder
from encore.machine import node, preflight
from encore.machine.preflight import Check
from encore.run import hints, planning, run_metadata, runner, submission
from encore.run.planning import Request
from encore.run.run_folder import RunFolder
from encore.run.submission import Prepared
from encore.run.supervise import Limits
from encore.slurm import commands, queue
from encore.slurm.script import Options
from encore.ssh import hosts

Mode = Literal["strong", "weak"]
# Progress hooks for a point's run; without a folder, hooks before the run.
HooksOf = Callable[["GridPoint", RunFolder | None], runner.Hooks]


@dataclass(frozen=True)
class GridPoint:
    nodes: int
    gpus_per_node: int
    precision: str | None = None
    image: str | None = None  # release of the image's base
    batch: int | None = None  # batch per rank, if set with the precision
    benchmark: str = ""  # for sweeps over multiple benchmarks

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def key(self) -> str:
        """``2x8-fp16``: the name of the point's folder."""
        parts = (self.benchmark, f"{self.nodes}x{self.gpus_per_node}", self.precision, self.image)
        return "-".join(filter(None, parts))

    @property
    def axes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}


class Sweep(Definition):
    # Common settings of all points; ``hosts`` are for the largest point, smaller points use the first hosts.
    request: Request
    gpus: tuple[int, ...]  # GPUs per node; ranks on CPUs
    nodes: tuple[int, ...] = (1,)
    # Benchmarks with their images (None: the default image of a run); empty: only the request's benchmark.
    benchmarks: dict[str, str | None] = Field(default_factory=dict)
    # fp16, or fp16:128 with the batch per rank for weak scaling; empty: the system's precision.
    precisions: tuple[str, ...] = ()
    full_nodes: bool = False  # multi-node points only with the largest GPU count
    # Releases of the base of the benchmark's image, the first one to be compared with; empty: no such axis.
    images: tuple[str, ...] = ()
    mode: Mode = "strong"
    global_batch: int | None = None  # of strong scaling; None: the system's

    @field_serializer("request")
    def _without_secrets(self, request: Request) -> dict[str, Any]:
        # Omit secret values: whoever resumes the study has them in the environment.
        return asdict(replace(request, environment=tuple(map(run_metadata.without_value, request.environment))))

    def points(self) -> list[GridPoint]:
        for name, counts in (("--gpus-per-node", self.gpus), ("--nodes", self.nodes)):
            if not counts or min(counts) < 1 or max(counts) > planning.MAX_GPUS:
                raise EncoreError(
                    f"{name} {','.join(map(str, counts))}",
                    expected=f"numbers from 1 to {planning.MAX_GPUS}",
                    hint=f"such as {name} 1,2,4",
                )
        batches = dict(_precision(spec, self.mode) for spec in self.precisions)
        points = [
            GridPoint(nodes, gpus, precision, image, batches.get(precision), benchmark)
            for benchmark, nodes, gpus, precision, image in itertools.product(
                self.benchmarks or ("",),
                dict.fromkeys(self.nodes),
                dict.fromkeys(self.gpus),
                batches or (None,),
                dict.fromkeys(self.images or (None,)),
            )
            if nodes == 1 or not self.full_nodes or gpus == max(self.gpus)
        ]
        return sorted(points, key=lambda point: (point.gpus, point.nodes, point.precision or ""))


def _precision(text: str, mode: Mode) -> tuple[str | None, int | None]:
    # Split ``fp16:128`` into the precision and the batch per rank.
    name, colon, batch = text.partition(":")
    if not colon:
        return name, None
    if not batch.isdecimal() or int(batch) < 1:
        raise EncoreError(f"--precision {text}", expected="a batch from 1 on", hint=f"--precision {name}:64")
    if mode == "strong":
        raise EncoreError(f"--precision {text} with strong scaling", hint="add --weak: the batch is per rank")
    return name, int(batch)


def point_request(sweep: Sweep, point: GridPoint, results: Path) -> Request:
    """Return a point's run request; the run folder is created in ``results``."""
    _refuse_settings(sweep)
    common = replace(sweep.request, name=point.benchmark or sweep.request.name)
    choice = catalogue.choose(common.name)
    # All points use the same system: as named, otherwise the best match for the largest node.
    system = planning.choose_system(choice, max(sweep.gpus), node.this_node(), common.system, common.round)
    precision = [f"precision={point.precision}"] if point.precision else []
    precision += [f"batch_size={point.batch}"] if point.batch else []
    types = configuration.field_types(choice.folder)
    known = {**system.config, **dict(configuration.parse_setting(setting, types) for setting in common.settings)}
    ranks_of = choice.benchmark.data_parallel_ranks
    ranks = ranks_of(system.config, system.nodes * system.gpus_per_node), ranks_of(known, point.gpus)
    batch = batch_settings(system, point, sweep.mode, sweep.global_batch, choice.benchmark.rates, ranks)
    return replace(
        common,
        gpus=point.gpus,
        system=system.system,
        results=results,
        # The user's settings come last and win.
        settings=(*batch, *precision, *common.settings),
        image=_image(sweep, point, choice),
        hosts=point_hosts(sweep, point),
    )


def point_hosts(sweep: Sweep, point: GridPoint) -> tuple[hosts.Host, ...]:
    """Return the hosts of a multi-node point; EncoreError if too few. Single-node points run on this machine."""
    hosts_given = sweep.request.hosts
    if point.nodes == 1 or not hosts_given:
        return ()
    if len(hosts_given) < point.nodes or min(host.slots for host in hosts_given[: point.nodes]) < point.gpus_per_node:
        raise EncoreError(
            f"--hosts {','.join(map(str, hosts_given))} for {point.nodes} nodes of {point.gpus_per_node} GPUs",
            expected="hosts for the largest node count, with enough GPUs per node",
            hint="list more hosts, or fewer --nodes",
        )
    return tuple(hosts.Host(host.name, point.gpus_per_node) for host in hosts_given[: point.nodes])


def _image(sweep: Sweep, point: GridPoint, choice: catalogue.Choice) -> str | None:
    # The benchmark's image on the point's release, as `encore images build --base` names it.
    image = sweep.benchmarks.get(point.benchmark) or sweep.request.image
    if point.image is None:
        return image
    if image is not None or sweep.request.runtime == "host":
        option = "--image" if image is not None else "--runtime host"
        raise EncoreError(f"--images with {option}", hint=f"leave out {option}: the sweep names the images")
    if point.image == images.STANDIN:
        return building.image_name(choice, images.STANDIN)
    return building.image_name(choice, images.find_release(choice.implementation.framework, point.image).release)


def _refuse_settings(sweep: Sweep) -> None:
    # Reject settings of grid axes.
    if sweep.global_batch is not None and (sweep.mode == "weak" or sweep.global_batch < 1):
        raise EncoreError(
            f"--global-batch {sweep.global_batch} with {sweep.mode} scaling",
            expected="a positive batch, which strong scaling divides among the ranks",
            hint="with --weak, set the batch per rank: --set batch_size=N",
        )
    names = {setting.partition("=")[0].strip() for setting in sweep.request.settings}
    for name, wrong, option in (
        ("batch_size", sweep.mode == "strong", "--global-batch, or --weak"),
        ("batch_size", any(":" in spec for spec in sweep.precisions), "--precision NAME:BATCH"),
        ("precision", bool(sweep.precisions), "--precision"),
    ):
        if wrong and name in names:
            raise EncoreError(f"--set {name}: the sweep sets it", hint=f"use {option}")


def batch_settings(
    system: System,
    point: GridPoint,
    mode: Mode,
    global_batch: int | None = None,
    rates: Sequence[str] = ("learning_rate",),
    ranks: tuple[int, int] | None = None,
) -> tuple[str, ...]:
    """Return settings that make a point's batch strong (one global batch) or weak (one batch per rank).

    The learning rate belongs to the global batch: it is unchanged in strong scaling, and follows Encore's rule for
    other GPU counts in weak scaling. Empty if the rule of the system already has this result. ``ranks``: data-parallel
    ranks of the system and of the point, by default their GPUs.
    """
    submitted, point_ranks = ranks or (system.nodes * system.gpus_per_node, point.gpus)
    if global_batch is not None:
        batch, rest = divmod(global_batch, point_ranks)
        if rest:
            raise EncoreError(
                f"{point_ranks} ranks cannot share a global batch of {global_batch} evenly",
                expected="a multiple of every number of ranks",
                hint="another --global-batch",
            )
        rates_set = {name: system.config[name] for name in rates if name in system.config}
        return (f"batch_size={batch}", *_as_settings(rates_set))
    strong = mode == "strong"
    has_other_split = point_ranks != submitted and point.gpus == system.nodes * system.gpus_per_node
    if strong == system.keep_global_batch and (strong or not has_other_split):
        return ()
    scaled = configuration.scaled(system, submitted, point_ranks, rates, keeps_batch=strong)
    values = {name: system.config[name] for name in ("batch_size", *rates) if name in system.config}
    return _as_settings({**values, **{name: value.value for name, value in scaled.items()}})


def _as_settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}={json.dumps(value)}" for name, value in values.items())


def is_submitted(sweep: Sweep, point: GridPoint, submit_all: bool) -> bool:
    """Return whether a scheduler runs a point: multi-node points without hosts, or all points."""
    return submit_all or (point.nodes > 1 and not sweep.request.hosts)


def refuse(sweep: Sweep, results: Path, submit_all: bool) -> list[tuple[GridPoint, Check]]:
    """Refuse a grid with a point that cannot be run; return the warnings of the points for this machine."""
    warnings = []
    for point in sweep.points():
        request = point_request(sweep, point, results)
        if is_submitted(sweep, point, submit_all):
            if not commands.is_installed():
                requirement = f"a point of {point.nodes} nodes" if point.nodes > 1 else "--submit"
                raise EncoreError(
                    f"{requirement} needs a scheduler (Slurm not found)",
                    expected="points on this machine, or a cluster login node",
                    hint="omit --nodes and --submit, or list the nodes: --hosts n1:4,n2:4",
                )
            preflight.refuse_failed(submission.checks(prepare_job(point, request)))
            continue
        plan = planning.make_plan(request)
        if point.image is not None and plan.target.runtime == "host":
            raise EncoreError(
                f"point {point.key} needs a container engine: {plan.target.reason}",
                hint=f"encore images build {request.name} --base {point.image}, on a machine with an engine",
            )
        warnings += [(point, check) for check in planning.refuse(planning.query_python(plan))]
    return warnings


def resume_command(folder: Folder[Sweep]) -> str:
    return hints.command("sweep", "--resume", folder.path.absolute())


def run(folder: Folder[Sweep], hooks: HooksOf, limits: Limits, submit_all: bool = False) -> ExitCode:
    """Run or submit all unfinished points; continue after a failed point, stop when interrupted."""

    def run_point(point: GridPoint, number: int) -> ExitCode:
        # Runs started by a job are resumed only by a job: this machine may be a login node.
        if is_submitted(folder.study, point, submit_all) or point.key in folder.jobs():
            _submit(folder, point)
            return ExitCode.REACHED
        existing = folder.run_of(point)
        if existing is not None:
            return runner.resume(existing, hooks(point, existing), limits).code
        plan = planning.query_python(planning.make_plan(point_request(folder.study, point, folder.point_folder(point))))
        created = runner.prepare_and_create(plan, hooks(point, None))
        return runner.execute(plan, created, hooks(point, created), limits).code

    return folders.measure(folder, run_point, resume_command(folder))


def _submit(folder: Folder[Sweep], point: GridPoint) -> None:
    # Submit a point to the scheduler, unless its job is still queued or running.
    if not commands.is_installed():
        raise EncoreError(f"point {point.key} needs a scheduler (Slurm not found)")
    job = folder.jobs().get(point.key)
    # Jobs unknown to the controller are not live.
    if job is not None and commands.show_job(job).get("JobState", "COMPLETED") not in queue.FINISHED_STATES:
        return
    existing = folder.run_of(point)
    job_script = (
        submission.prepare_resume(existing.path, Options(cluster=folder.study.request.cluster))
        if existing is not None
        else prepare_job(point, point_request(folder.study, point, folder.point_folder(point)))
    )
    folder.record_job(point, submission.submit(job_script))


def prepare_job(point: GridPoint, request: Request) -> Prepared:
    """Return the point's batch job; does not need Slurm."""
    resources = Options(nodes=point.nodes, gpus_per_node=point.gpus_per_node, cluster=request.cluster)
    # Nodes and GPUs are the job's, not the command line's.
    request_ = replace(request, gpus=None, nodes=None)
    return submission.prepare(request_, _arguments(request_), resources)


def _arguments(request: Request) -> tuple[str, ...]:
    # Options of ``encore run`` for this request, without GPUs and cluster file.
    names = ("system", "round", "data", "results", "runs", "seed", "runtime", "image", "python")
    options = {f"--{name}": value for name in names if (value := getattr(request, name)) is not None}
    argv = [word for name, value in options.items() for word in (name, str(value))]
    argv += [word for setting in request.settings for word in ("--set", setting)]
    argv += [word for variable in request.environment for word in ("--env", variable)]
    if request.drop_caches is not None:
        argv.append("--drop-caches" if request.drop_caches else "--no-drop-caches")
    return tuple(argv)
