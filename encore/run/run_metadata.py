"""What is written of a run before its ranks start: the passport, the system description, the head of the MLPerf log.

The passport is everything needed to know later what exactly was run. No secrets go into it.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import NotRequired, TypedDict

from encore import __version__, checkout, files, job
from encore.catalogue import SystemKind
from encore.checkout import CodeState
from encore.configuration import Configuration, Deviation, Value
from encore.containers.runtimes import UsedImage
from encore.errors import EncoreError
from encore.machine import node
from encore.machine.links import Links
from encore.machine.preflight import WeightsFile
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.rules import canonical
from encore.run.run_folder import SCHEMA
from encore.slurm import cluster as clusters
from encore.slurm.queue import SlurmJob
from encore.ssh.hosts import Host

REDACTED = "(redacted)"
ASSIGNMENT = re.compile(r"(--[a-z-]+=)?(?P<name>[A-Za-z_]\w*)=")  # ``NAME=`` or ``--env=NAME=``, before the value
SECRET = re.compile(
    r"token|key|secret|passw|passphrase|pgpass|credential|auth|webhook|(^|_)(pass|pat|dsn)(_|$)|_pwd(_|$)|^aws_"
    r"|(^|_)(https?|all|ftp)_proxy$",
    re.IGNORECASE,
)
# User and password, or a token instead of both, in a URL
LOGIN = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:[^\s/@:]*:[^\s@]*|(?<=http://)[^\s/@]+|(?<=https://)[^\s/@]+)@", re.IGNORECASE
)
TOKEN = re.compile(r"\b(?:gh[pousr]_|github_pat_|hf_|glpat-|xox[abeprs]-|AKIA|ASIA|sk-)[\w-]{12,}")
NOTIFY = "ENCORE_NOTIFY"  # Variable of ``encore run --notify``


class Submission(TypedDict):
    """What the result may be called."""

    kind: SystemKind  # Of the system
    submitted: bool  # Whether it is a submitted configuration, on GPUs
    of: str  # Whose: the submission, or the system where there is none
    text: str  # The same as a sentence


class DataFacts(TypedDict):
    """The data set, as its manifest has it."""

    id: str
    name: str
    folder: str
    counts: dict[str, int]  # Samples of each split
    unearned: NotRequired[str]  # Why it is not the published data set whose name it has


class Described(TypedDict):
    """What is known of a run before it begins."""

    schema: int  # Version of this format
    encore: str  # Version of Encore
    created: str  # UTC
    benchmark: str
    implementation: str
    name: str  # As the command line takes it
    round: str
    system: str
    system_source: str  # Where the values of the system are from
    submission: Submission
    # Each difference from the system file; empty: exactly that configuration.
    deviations: list[Deviation]
    nodes: int
    ranks_per_node: int
    runtime: str  # ``host``, or the container runtime
    image: UsedImage | None  # Null on the host
    arguments: list[str]  # The command line, with `--notify` and values of `--env` that look like secrets redacted
    cluster_file: str  # The cluster file that `--cluster` or `ENCORE_CLUSTER` named; else empty
    command: list[str]  # What was executed for experiment 0, with the run folder written as `RUN`
    environment: dict[str, str]  # Of that command, with secrets redacted
    code: CodeState
    data: DataFacts
    seeds: list[int]  # One for each experiment
    configuration: dict[str, Value]  # Every key
    node: node.Node  # The first node
    user_id: int


class Utilization(TypedDict):
    """The speed of an experiment, without evaluations."""

    unit: str  # What is counted: samples or tokens, for example
    flops_per_sample: float  # Model FLOPs of training on one `unit`
    samples_per_second: float
    flops_per_second: float
    # Of all GPUs in the numerical precision of the products; only of a GPU whose data sheet is known.
    peak_flops_per_second: NotRequired[float]
    peak_source: NotRequired[str]
    mfu: NotRequired[float]  # The ratio of the two


class Startup(TypedDict):
    """Where the time from the start of rank 0's process to the clock went, part by part."""

    seconds: dict[str, float]
    budget: dict[str, float]  # Of each part on eight GPUs, 60 s in all


class Written(TypedDict):
    """Checkpoints that were written while training continued."""

    count: int
    seconds: float  # Of writing
    stopped: float  # Seconds in which training stood still for them


class Compiled(TypedDict):
    """What `torch.compile` left in the user's cache, `encore/compiled/KEY.bin`."""

    key: str  # The kind of run: image or Python, implementation, GPUs with their driver, configuration
    found: bool  # Whether an earlier run had left it


class Begun(Described):
    """What is known of a run when it begins."""

    links: Links  # Sockets, and the links of GPUs and network adapters by `nvidia-smi topo -m` or NVML
    weights: dict[str, WeightsFile]  # Files of trained weights that the run began with, by key
    drop_caches: bool  # Whether to drop the page cache before each experiment
    extra_environment: dict[str, str]  # Variables of `--env`, with secrets redacted
    hosts: list[Host]  # Hosts of a run over ssh; else empty
    launcher: str | None  # Launcher of a run over ssh
    python: dict[str, Any] | None  # The Python that `--python` named, with what it answered
    slurm: SlurmJob | None


class InPods(TypedDict):
    """How a run in the pods of a Kubernetes cluster was sent there, for what asks about it and resumes it."""

    folder: str  # The run's, as its pods see it: from it follow the names of its workloads
    settings: dict[str, Any]  # Of the cluster file, with the context that it was sent by
    kind: str  # job, jobset or trainjob
    seconds: int | None  # Time limit; null: none
    prepares: list[str]  # The command that makes the toy data set before the training; empty: it is there
    user: int
    group: int


class RunMetadata(Begun):
    """What was run, with what, where."""

    sha256: str  # Of all the other fields: a file that was changed or damaged is refused
    rank_environment: NotRequired[dict[str, str]]  # What rank 0 of experiment 0 saw of its libraries' variables
    # By experiment, from `"0"`, added when it has ended: what its training took where the configuration says "auto". Of
    # a Slurm array that of experiment 0 alone. A resumed run takes the same again.
    choices: NotRequired[dict[str, dict[str, Any]]]
    evidence: NotRequired[dict[str, dict[str, Any]]]  # By experiment: what it computed and sent in, how it was split
    utilization: NotRequired[dict[str, Utilization]]  # By experiment
    startup: NotRequired[dict[str, Startup]]  # By experiment
    checkpoints: NotRequired[dict[str, Written]]  # By experiment, where any were
    kubernetes: NotRequired[InPods]
    compiled: NotRequired[dict[str, Compiled]]  # By experiment, where `torch.compile` is used on GPUs


def parse_environment(settings: tuple[str, ...], caller: Mapping[str, str]) -> dict[str, str]:
    # Variables of ``--env NAME=VALUE`` and, taken from the caller, ``--env NAME``.
    variables = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not name.isidentifier():
            raise EncoreError(f"--env {name!r} names no variable", expected="NAME=VALUE or NAME")
        if not separator and name not in caller:
            raise EncoreError(f"--env {name}: the variable is not set", hint=f"give it a value: --env {name}=VALUE")
        variables[name] = value if separator else caller[name]
    return variables


def is_secret(name: str, value: str) -> bool:
    return bool(SECRET.search(name)) or redact_text(value) != value


def redact_text(text: str) -> str:
    return TOKEN.sub(REDACTED, LOGIN.sub(rf"\1{REDACTED}@", text))


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name, value) else value for name, value in environment.items()}


def restore(variables: Mapping[str, str], again: str) -> dict[str, str]:
    """Return variables of an earlier call; the values of secrets, which were not kept, come from this caller.

    ``again`` is the command that resumes the run.
    """
    missing = [name for name, value in variables.items() if value == REDACTED and name not in os.environ]
    if missing:
        raise EncoreError(
            f"the run was given {', '.join(missing)}, whose value is not kept",
            hint=f"set it again: {missing[0]}=VALUE {again}",
        )
    return {name: os.environ[name] if v == REDACTED else v for name, v in variables.items()}


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    redacted = []
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        assignment = ASSIGNMENT.match(argument)
        if previous == "--notify":
            redacted.append(REDACTED)
        elif argument.startswith("--notify="):
            redacted.append(f"--notify={REDACTED}")
        elif assignment and is_secret(assignment["name"], argument[assignment.end() :]):
            redacted.append(f"{assignment[0]}{REDACTED}")
        else:
            redacted.append(redact_text(argument))
    return redacted


def split_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return arguments of ``encore run`` without secrets, and the variables that have to carry these instead.

    ``--env NAME=VALUE`` becomes ``--env NAME``, and ``--notify`` is left out.
    """
    plain: list[str] = []
    variables: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        option, separator, value = argument.partition("=")
        if option not in ("--env", "--notify"):
            plain.append(argument)
            continue
        value = value if separator else next(remaining, "")
        name, separator, secret = value.partition("=")
        if option == "--notify":
            variables[NOTIFY] = value
        elif separator and is_secret(name, secret):
            variables[name] = secret
            plain += ["--env", name]
        else:
            plain += ["--env", value]
    return tuple(plain), variables


def without_value(setting: str) -> str:
    """Return ``NAME`` for the ``NAME=VALUE`` of a secret, any other setting unchanged."""
    name, _, value = setting.partition("=")
    return name if is_secret(name, value) else setting


def submission_of(configuration: Configuration, data_set: DataFacts) -> Submission:
    """Return what the result may be called: a sentence, and the kind of system and its submission for programs."""
    full = configuration.choice.benchmark.full_data.name
    system, submitted = configuration.system, False
    if configuration.get("device") == "cpu":
        text = "a CPU run: for trying the code, never a reproduction"
    elif system.kind == "small":
        text = "the toy data set on GPUs: for trying the code, never a reproduction"
    elif configuration.is_submitted and (data_set["name"] != full or data_set.get("unearned")):
        text = f"the submitted configuration of {system.submission or system.system}, on other data than {full}"
    elif configuration.is_submitted:
        text, submitted = f"the submitted configuration of {system.submission or system.system}", True
    else:
        text = f"not a submitted configuration: {configuration.why_not_submitted}"
    return {"kind": system.kind, "submitted": submitted, "of": system.submission or system.system, "text": text}


def describe(
    configuration: Configuration,
    command: job.Command,
    data_set: DataFacts,
    machine: node.Node,
    seeds: list[int],
    runtime: str,
    image: UsedImage | None = None,
) -> Described:
    return {
        "schema": SCHEMA,
        "encore": __version__,
        "created": files.utc_now(),
        "benchmark": configuration.choice.benchmark.name,
        "implementation": configuration.choice.implementation_name,
        "name": configuration.choice.name,
        "round": configuration.system.round,
        "system": configuration.system.system,
        "system_source": configuration.system.source,
        "submission": submission_of(configuration, data_set),
        "nodes": configuration.nodes,
        "ranks_per_node": configuration.ranks_per_node,
        "runtime": runtime,
        "arguments": redact_arguments(sys.argv[1:]),
        "cluster_file": clusters.named(),
        "command": [redact_text(argument) for argument in command.argv],
        "environment": redact(command.environment),
        "code": checkout.code_state(),
        "image": image,
        "data": data_set,
        "seeds": seeds,
        "configuration": configuration.values,
        "deviations": list(configuration.deviations),
        "node": machine,
        "user_id": os.getuid(),
    }


def system_description(configuration: Configuration, machine: node.Node, software: Mapping[str, str]) -> dict[str, Any]:
    """Return MLPerf's system description; what is not known stays empty (schema of the v0.7 repository).

    ``software`` are the versions of what runs, such as ``dali_version``.
    """
    driver = {"cuda_driver_version": machine.gpus[0].driver} if machine.gpus else {}
    gpu = machine.gpus[0] if machine.gpus and configuration.get("device") == "gpu" else None
    return {
        **dict.fromkeys(DESCRIPTION_FIELDS, ""),
        "division": configuration.division,
        "status": "research",
        "system_name": machine.hostname,
        "number_of_nodes": str(configuration.nodes),
        "host_processors_per_node": str(machine.sockets or ""),
        "host_processor_model_name": machine.cpu,
        "host_processor_vcpu_count": str(machine.cores),
        "host_memory_capacity": f"{machine.memory_gib:g} GiB",
        "accelerators_per_node": str(configuration.ranks_per_node if gpu else 0),
        "accelerator_model_name": gpu.name if gpu else "",
        "accelerator_memory_capacity": f"{gpu.memory_gib:g} GiB" if gpu else "",
        "framework": configuration.choice.implementation.framework,
        "other_software_stack": {**driver, **software},
        "operating_system": machine.operating_system,
    }


def write_log_header(path: Path, configuration: Configuration, machine: node.Node, cache_cleared: bool) -> None:
    """Start the log at ``path`` with what is run, by whom and on what, and the cache event.

    A submitted configuration is checked by the rules of the closed division, anything else by those of the
    open one; the status is always "research", since Encore submits nothing.
    """
    from mlperf_logging.mllog import constants
    from mlperf_logging.mllog.mllog import MLLogger

    name, round_name = configuration.choice.benchmark.name, configuration.system.round
    benchmark = canonical(name) or name
    on_gpus = configuration.get("device") == "gpu" and bool(machine.gpus)
    device = f"x {machine.gpus[0].name}" if on_gpus else f"ranks on {machine.cpu}"
    platform = f"{configuration.ranks} {device}"
    events: dict[str, Any] = {
        constants.SUBMISSION_BENCHMARK: benchmark,
        constants.SUBMISSION_ORG: "Encore",
        constants.SUBMISSION_DIVISION: configuration.division,
        constants.SUBMISSION_STATUS: "research",
        constants.SUBMISSION_PLATFORM: platform,
    }
    cleared = "run_clear_caches" if round_name == "v0.5" else constants.CACHE_CLEAR
    if round_name == "v0.6":
        entry = {"hardware": platform, "framework": configuration.choice.implementation.framework}
        events |= {"submission_entry": str(entry), "submission_poc_name": "none: not submitted"}
    events[cleared] = cache_cleared
    handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    logger = logging.Logger("encore.header", logging.INFO)
    logger.addHandler(handler)
    log = MLLogger(logger=logger)
    try:
        for key, value in events.items():
            # Events of the first rounds as the ranks write theirs: benchmarks/common/run/mllog.py.
            if round_name == "v0.5":
                prefix = f":::MLPv0.5.0 {benchmark} {time.time():.9f} (run_metadata.py:0)"
                logger.info("%s %s: %s", prefix, key, json.dumps(value))
            elif round_name == "v0.6":
                content = {"value": value, "metadata": {"file": "run_metadata.py", "lineno": 0}}
                logger.info(":::MLL %.3f %s: %s", time.time(), key, json.dumps(content))
            else:
                log.event(key, value)
    finally:
        handler.close()
