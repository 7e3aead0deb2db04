"""Every submitted system against the submitted scripts: hyperparameters, settings of DALI, environment.

tests/samples/submitted_configurations.toml contains the commands and variables of the submitted scripts, recorded by
executing them, independently of the system files. `encore reproduce` has the same mapping
from options to keys (benchmarks/NAME/submitted.toml).
"""

import shlex
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from encore import catalogue, configuration, files, job, launchers, paths
from encore.lab.submissions import option_mapping, reproduction, shell_expansion

SAMPLES = paths.ROOT / "tests" / "samples"
IGNORED = option_mapping.common().left_out


def effective(tables: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    # Remove values that a later file overrides
    result: dict[str, dict[str, str]] = {}
    for file in sorted(tables, key=lambda file: (file == "Dockerfile", "_common" in file, file != "run_and_time.sh")):
        overridden = {name for later in result for name in tables[later]}
        result[file] = {name: value for name, value in tables[file].items() if name not in overridden}
    return result


@cache
def submitted() -> list[Any]:
    # Submitted configurations: the system, the options of the executed command and their keys, variables by file
    configurations = []
    for submission in files.read_toml(SAMPLES / "submitted_configurations.toml")["submission"]:
        folder, round_name = submission["folder"], submission["repository"].rpartition("_")[2]
        for entry in submission["configuration"]:
            command = tuple(shell_expansion.Value(word) for word in shlex.split(entry["command"]))
            programs = {word.text.rpartition("/")[2] for word in command}
            implementations = option_mapping.find_implementations(folder)
            name, implementation = next(item for item in implementations if programs & set(item[1].program))
            choice = catalogue.choose(name)
            systems = [system for system in catalogue.systems(choice) if system.system == entry["system"]]
            system = next(s for s in systems if folder in s.source and round_name in s.source)
            scripts = {"Dockerfile": submission["dockerfile"], **entry.get("environment", {})}
            environment = effective(
                {file: dict(w.split("=", 1) for w in text.split()) for file, text in scripts.items()}
            )
            variables = {key: shell_expansion.Value(v) for table in environment.values() for key, v in table.items()}
            options = option_mapping.parse_options(command, implementation.pairs_after)
            facts = {
                "round": round_name, "configuration": entry["config"], "nodes": system.nodes,
                "gpus": system.gpus_per_node, "ranks": system.nodes * system.gpus_per_node,
            }  # fmt: skip
            mapped, missing = option_mapping.map_options(
                implementation, choice.implementation_name, options, facts, variables
            )
            assert not missing
            configurations.append(SimpleNamespace(
                choice=choice, round=round_name, system=system, implementation=implementation, options=options,
                environment=environment, mapped=mapped,
            ))  # fmt: skip
    return configurations


def resolve(choice: catalogue.Choice, system: catalogue.System, *settings: str) -> configuration.Configuration:
    return configuration.resolve(choice, system, system.nodes, system.gpus_per_node, list(settings))


def test_systems_have_the_submitted_values_and_no_others() -> None:
    # Not parametrized: all workers of pytest-xdist would read the scripts at collection
    for entry in submitted():
        label = f"{entry.choice.name}, {entry.round}, {entry.system.system}"
        resolved, values = resolve(entry.choice, entry.system), {key.key: key.value for key in entry.mapped}
        assert {key: resolved.get(key) for key in {**values, **entry.system.config}} == values, label
        assert entry.system.keep_global_batch == entry.implementation.keep_global_batch, label
        # An option without a key has a documented meaning.
        options = reproduction.left_options(
            entry.options, entry.mapped, entry.implementation.without, option_mapping.common()
        )
        assert entry.round > "v1" or not [option.name for option in options if not option.meaning], label
        tables = {
            file: {name: value for name, value in table.items() if name not in IGNORED}
            for file, table in entry.environment.items()
        }
        assert entry.system.environment == {file: table for file, table in tables.items() if table}, label
        # Minigo writes a checkpoint per generation (run() in train.py of v0.7).
        assert entry.choice.name == "minigo" or resolved.get("checkpoint_interval") == 0, label
        assert not resolved.is_submitted or "auto" not in resolved.plain().values(), label


def test_every_submitted_system_is_compared() -> None:
    compared = {(entry.choice.name, entry.system.file) for entry in submitted()}
    assert compared == {
        (name, system.file)
        for name, choice in {entry.choice.name: entry.choice for entry in submitted()}.items()
        for system in catalogue.systems(choice)
        if system.kind in ("submitted", "later")
    }


def rank_environment(name: str, system: str, *settings: str, **variables: str) -> dict[str, str]:
    choice = catalogue.choose(name)
    resolved = resolve(choice, catalogue.find_system(choice, system, None), *settings)
    return job.rank_environment(resolved, launchers.Launch("horovodrun"), variables, 16)


# NGC's PyTorch images have TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1.
@pytest.mark.parametrize(
    ("name", "system", "settings", "variable", "expected"),
    [
        ("resnet", "dgx1", (), "HOROVOD_CYCLE_TIME", "0.1"),
        ("resnet-tensorflow", "dgx1", (), "HOROVOD_CYCLE_TIME", None),
        ("ncf", "cpu", ("precision=fp32", "device=gpu"), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0"),
        ("ncf", "cpu", ("precision=tf32", "device=gpu"), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None),
    ],
)
def test_environment_of_the_ranks(
    name: str, system: str, settings: tuple[str, ...], variable: str, expected: str | None
) -> None:
    assert rank_environment(name, system, *settings).get(variable) == expected
    assert rank_environment(name, system, *settings, **{variable: "7"})[variable] == "7", "set by the user"


def test_variable_that_is_set_twice_is_refused() -> None:
    fields = catalogue.systems(catalogue.choose("resnet"))[-1].model_dump()
    environment = {"Dockerfile": {"OMP_NUM_THREADS": "1"}, "run.sh": {"OMP_NUM_THREADS": "2"}}
    with pytest.raises(ValidationError, match="set twice: OMP_NUM_THREADS"):
        catalogue.System.model_validate({**fields, "environment": environment})


@pytest.mark.parametrize(
    ("family", "source"), [("v100", "dgx2"), ("a100", "dgxa100"), ("h100", "dgxa100"), ("h200", "dgxa100")]
)
def test_systems_for_one_gpu_scale_a_submission(family: str, source: str) -> None:
    choice = catalogue.choose("resnet")
    submission = resolve(choice, catalogue.find_system(choice, source, "v0.7"))
    rate = submission.get("learning_rate") / (submission.get("batch_size") * submission.ranks)
    keys = ("optimizer", "epochs", "warmup_epochs", "weight_decay", "momentum", "schedule")
    for one in (resolve(choice, s) for s in catalogue.systems(choice) if s.kind == "derived" and family in s.system):
        scaled = pytest.approx(rate * one.get("batch_size"), rel=1e-4)
        values = (one.get("learning_rate"), one.is_submitted, one.division, *map(one.get, keys))
        assert values == (scaled, False, "open", *map(submission.get, keys))
