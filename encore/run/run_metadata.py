"""Files written before the ranks start: run metadata (run.json), system description, and header of the MLPerf log.

The metadata identifies exactly what was run. It must not contain secrets.
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

from encore import __version__, files, job, release
from encore.catalogue import SystemKind
from encore.configuration import Configuration, Deviation, Value
from encore.containers.runtimes import UsedImage
from encore.data import DataPassport
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
    r"token(?!iz)|key|secret|passw|passphrase|pgpass|credential|auth(?!or(?!iz))|webhook|bearer|cookie|session|signature"
    r"|connection_?str|(^|_)(pass|pw|pat|pin|dsn|jwt|sas|creds?)(_|$)|pass$|_pwd(_|$)|^pwd_|(db|sql|user|root|smtp|ldap)pwd$"
    r"|^aws_|(^|_)(https?|all|ftp)_proxy$|(^|_)(database|db|redis|mongo(db)?|amqp|broker)_ur[il]$",
    re.IGNORECASE,
)
LOCATION = re.compile(r"_(file|path|dir|sock)$", re.IGNORECASE)  # Names of variables with the location of a secret
# User and password, or a token instead of both, in a URL; ``user:password@host`` without a scheme. Neither a port
# (``host:80/x@y``) nor an image digest (``image:tag@sha256:...``) is a password.
LOGIN = re.compile(
    r"((?<![\w+.-])[a-z][a-z0-9+.-]*://)(?:[^\s/@:]*:(?!\d+[/?#])\S*|(?<=http://)[^\s/@]+|(?<=https://)[^\s/@]+)@(?!sha\d+:)"
    r"|(?<![^\s=,;'\"(])(?!mailto:)[\w.+-]*:[^\s/@,;]+@(?!sha\d+:)(?=[a-z]|\d+(?:\.\d+){3}|\[)",
    re.IGNORECASE,
)
# ``--db-password x``, ``password=x`` or ``"secret": "x"`` in a text, up to the value
_SECRET_WORD = (
    r"[\w-]{0,64}(?:passw(?:or)?d|passphrase|pgpass|\w[_-]pwd|secret|(?:api|access|auth|private|hf)[_-]?(?:key|token))"
    r"\w{0,32}"
)
NAMED = re.compile(
    rf"(?<![\w-])(--?(?:{_SECRET_WORD}|token)[\s=:]+|(?:{_SECRET_WORD}[\"']?|token[\"'])\s*[=:]\s*)(?!\(redacted\))"
    r"(?:\"[^\"]*\"|'[^']*'|[^\s\"']+)",
    re.IGNORECASE,
)
TOKEN = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|hf_|glpat-|nvapi-|xox[abeprs]-|AKIA|ASIA|sk-)[\w-]{12,}|\beyJ[\w-]+\.[\w-]+\.[\w-]*"
    r"|\b[Bb]earer +\S+|hooks\.slack\.com/services/\S+|-----BEGIN [A-Z ]*PRIVATE KEY-----.*"
    r"|(?<=[?&])(?i:[\w-]*(?:token|key|secret|passw|signature)[\w-]*|sig)=[^\s&]+",
    re.DOTALL,
)
NOTIFY = "ENCORE_NOTIFY"  # Variable of ``encore run --notify``


class Submission(TypedDict):
    """Description of how the result may be reported."""

    kind: SystemKind  # Of the system
    submitted: bool  # Whether it is a submitted configuration, on GPUs
    of: str  # Name of the submission, else of the system
    text: str  # The same as a sentence


class DataFacts(TypedDict):
    """Data set, from its manifest."""

    id: str
    name: str
    folder: str
    counts: dict[str, int]  # Samples per split
    unearned: NotRequired[str]  # Why it does not qualify as the published data set of this name


class Described(TypedDict):
    """Facts that are known before a run starts."""

    schema: int  # Version of this format
    encore: str  # Version of Encore
    created: str  # UTC
    benchmark: str
    implementation: str
    name: str  # Name on the command line
    round: str
    system: str
    system_source: str  # Where the values of the system are from
    submission: Submission
    # Differences from the system file; empty: identical configuration.
    deviations: list[Deviation]
    nodes: int
    ranks_per_node: int
    runtime: str  # ``host``, or the container runtime
    image: UsedImage | None  # Null on the host
    arguments: list[str]  # The command line, with `--notify` and values of `--env` that look like secrets redacted
    cluster_file: str  # Cluster file of `--cluster` or `ENCORE_CLUSTER`; empty if not set
    command: list[str]  # Command of experiment 0, with the run folder written as `RUN`
    environment: dict[str, str]  # Of that command, with secrets redacted
    code: release.CodeState
    data: DataFacts
    seeds: list[int]  # One per experiment
    configuration: dict[str, Value]  # Every key
    node: node.Node  # The first node
    user_id: int


class Utilization(TypedDict):
    """Training speed, excluding evaluations."""

    unit: str  # Unit of the counts, such as samples or tokens
    flops_per_sample: float  # Model FLOPs of training on one `unit`
    samples_per_second: float
    flops_per_second: float
    # Peak of all GPUs at the GEMM precision; only for GPUs with a known data sheet.
    peak_flops_per_second: NotRequired[float]
    peak_source: NotRequired[str]
    mfu: NotRequired[float]  # The ratio of the two


class Startup(TypedDict):
    """Where the time from the start of rank 0's process to the clock went, part by part."""

    seconds: dict[str, float]
    budget: dict[str, float]  # Limit per part on eight GPUs, 60 s in total


class Written(TypedDict):
    """Checkpoints that were written while training continued."""

    count: int
    seconds: float  # Of writing
    stopped: float  # Seconds that training was blocked


class Compiled(TypedDict):
    """Cache of `torch.compile` in the user's cache, `encore/compiled/KEY.bin`."""

    key: str  # Hash of image or Python, implementation, GPUs, driver and configuration
    found: bool  # Whether a previous run had filled the cache


class Begun(Described):
    """Facts that are known when a run starts."""

    links: Links  # Sockets, and the links of GPUs and network adapters by `nvidia-smi topo -m`
    weights: dict[str, WeightsFile]  # Pretrained weight files that the run started from, by key
    drop_caches: bool  # Whether to drop the page cache before every experiment
    extra_environment: dict[str, str]  # Variables of `--env`, with secrets redacted
    hosts: list[Host]  # Hosts of an ssh run; empty otherwise
    launcher: str | None  # Launcher of an ssh run
    python: dict[str, Any] | None  # The Python of `--python`, with its reported facts
    slurm: SlurmJob | None


class InPods(TypedDict):
    """Submission of a run to Kubernetes, needed to query and resume it."""

    folder: str  # Run folder as seen by the pods; determines the names of the workloads
    settings: dict[str, Any]  # Of the cluster file, with the context that it was sent by
    kind: str  # job or jobset
    seconds: int | None  # Time limit; null: none
    prepares: list[str]  # The command that makes the toy data set before the training; empty: it is there
    user: int
    group: int


class RunMetadata(Begun):
    """Complete record of a run."""

    sha256: str  # Checksum of all other fields; modified or damaged files are rejected
    rank_environment: NotRequired[dict[str, str]]  # Library variables of rank 0 in experiment 0
    # Values chosen at run time for "auto" settings, by experiment from `"0"`, added at its end. For a Slurm array only
    # experiment 0. A resumed run reuses them.
    choices: NotRequired[dict[str, dict[str, Any]]]
    # By experiment: computed and communicated work, and parallel layout
    evidence: NotRequired[dict[str, dict[str, Any]]]
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
            raise EncoreError(f"--env {name!r} is not a variable name", expected="NAME=VALUE or NAME")
        if not separator and name not in caller:
            raise EncoreError(f"--env {name}: the variable is not set", hint=f"set it: --env {name}=VALUE")
        variables[name] = value if separator else caller[name]
    return variables


def is_secret(name: str, value: str) -> bool:
    return bool(SECRET.search(name) and not LOCATION.search(name)) or redact_text(value) != value


def redact_text(text: str) -> str:
    return TOKEN.sub(REDACTED, LOGIN.sub(rf"\1{REDACTED}@", NAMED.sub(rf"\1{REDACTED}", text)))


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name, value) else value for name, value in environment.items()}


def restore(variables: Mapping[str, str], again: str) -> dict[str, str]:
    """Restore variables from an earlier command; secrets, which are not stored, are read from the current environment.

    ``again`` is the command that resumes the run.
    """
    missing = [name for name, value in variables.items() if value == REDACTED and name not in os.environ]
    if missing:
        raise EncoreError(
            f"the run used {', '.join(missing)}, whose value was not stored",
            hint=f"set it again: {missing[0]}=VALUE {again}",
        )
    return {name: os.environ[name] if v == REDACTED else v for name, v in variables.items()}


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    redacted = []
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        is_setting = previous == "--set" or argument.startswith("--set=")  # Of the configuration, such as token_bucket
        assignment = None if is_setting else ASSIGNMENT.match(argument)
        if previous == "--notify" or NAMED.fullmatch(f"{previous} x"):
            redacted.append(REDACTED)
        elif argument.startswith("--notify="):
            redacted.append(f"--notify={REDACTED}")
        elif assignment and is_secret(assignment["name"], argument[assignment.end() :]):
            redacted.append(f"{assignment[0]}{REDACTED}")
        else:
            redacted.append(redact_text(argument))
    return redacted


def split_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Remove secrets from arguments of ``encore run``. Return the arguments and the variables that replace the secrets.

    ``--env NAME=VALUE`` becomes ``--env NAME``; ``--notify`` is removed.
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
    """Return ``NAME`` for ``NAME=VALUE`` with a secret value, otherwise the setting unchanged."""
    name, _, value = setting.partition("=")
    return name if is_secret(name, value) else setting


def data_facts(manifest: DataPassport, folder: str) -> DataFacts:
    facts: DataFacts = {"id": manifest.id, "name": manifest.name, "folder": folder, "counts": dict(manifest.counts)}
    if manifest.unearned:
        facts["unearned"] = manifest.unearned
    return facts


def submission_of(configuration: Configuration, data_set: DataFacts) -> Submission:
    """Return how the result may be reported: a sentence for users; kind and submission for programs."""
    full = configuration.choice.benchmark.full_data.name
    system, submitted = configuration.system, False
    if configuration.get("device") == "cpu":
        text = "a CPU run: to test the code, never a reproduction"
    elif system.kind == "small":
        text = "the toy data set on GPUs: to test the code, never a reproduction"
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
        "cluster_file": clusters.file_from_environment(),
        "command": redact_arguments(command.argv),
        "environment": redact(command.environment),
        "code": release.code_state(),
        "image": image,
        "data": data_set,
        "seeds": seeds,
        "configuration": configuration.values,
        "deviations": list(configuration.deviations),
        "node": machine,
        "user_id": os.getuid(),
    }


def system_description(configuration: Configuration, machine: node.Node, software: Mapping[str, str]) -> dict[str, Any]:
    """Return the MLPerf system description (schema of the v0.7 repository). Unknown fields are empty.

    ``software`` has versions, such as ``dali_version``.
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
    """Write the submission and cache events at the start of the log.

    Submitted configurations are checked by the rules of the closed division, all others by the open division. The
    status is always "research", because Encore does not submit results.
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
