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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from encore import __version__, checkout, files, job
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.machine import node
from encore.results.published.systems import DESCRIPTION_FIELDS
from encore.results.rules import canonical
from encore.run.run_folder import SCHEMA
from encore.slurm import cluster as clusters

REDACTED = "(redacted)"
ASSIGNMENT = re.compile(r"(--[a-z-]+=)?(?P<name>[A-Za-z_]\w*)=")  # ``NAME=`` or ``--env=NAME=``, before the value
SECRET = re.compile(r"token|key|secret|passw|credential|auth", re.IGNORECASE)


def parse_environment(settings: tuple[str, ...], caller: Mapping[str, str]) -> dict[str, str]:
    # Variables of ``--env NAME=VALUE`` and, taken from the caller, ``--env NAME``.
    variables = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not name.isidentifier():
            raise EncoreError(f"--env {setting!r} names no variable", expected="NAME=VALUE or NAME")
        if not separator and name not in caller:
            raise EncoreError(f"--env {name}: the variable is not set", hint=f"give it a value: --env {name}=VALUE")
        variables[name] = value if separator else caller[name]
    return variables


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: REDACTED if SECRET.search(name) else value for name, value in environment.items()}


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
    shown = []
    for argument in arguments:
        match = ASSIGNMENT.match(argument)
        secret = match is not None and SECRET.search(match["name"])
        shown.append(f"{match[0]}{REDACTED}" if match and secret else argument)
    return shown


def submission_of(configuration: Configuration, data_set: Mapping[str, Any]) -> dict[str, Any]:
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
    data_set: dict[str, Any],
    machine: node.Node,
    seeds: list[int],
    runtime: str,
    image: dict[str, Any] | None = None,
) -> dict[str, Any]:
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
        "command": list(command.argv),
        "environment": redact(command.environment),
        "code": checkout.code_state(),
        "image": image,
        "data": data_set,
        "seeds": seeds,
        "configuration": {
            name: {"value": value.value, "origin": value.origin} for name, value in configuration.values.items()
        },
        "deviations": [asdict(each) for each in configuration.deviations],
        "node": machine.as_json(),
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
    each = f"x {machine.gpus[0].name}" if on_gpus else f"ranks on {machine.cpu}"
    platform = f"{configuration.ranks} {each}"
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
                place = f":::MLPv0.5.0 {benchmark} {time.time():.9f} (passport.py:0)"
                logger.info("%s %s: %s", place, key, json.dumps(value))
            elif round_name == "v0.6":
                content = {"value": value, "metadata": {"file": "passport.py", "lineno": 0}}
                logger.info(":::MLL %.3f %s: %s", time.time(), key, json.dumps(content))
            else:
                log.event(key, value)
    finally:
        handler.close()
