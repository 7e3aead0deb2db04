"""Every submitted system against the scripts that were submitted: hyperparameters, DALI's settings, environment.

The scripts' side is tests/samples/submitted_configurations.toml, which tools/submitted_configurations.py wrote by
executing them; it knows nothing of our systems. Which option is which key is the mapping of `encore reproduce`
(benchmarks/NAME/submitted.toml), which reads the same scripts and executes nothing.
"""

import shlex
from dataclasses import dataclass
from functools import cache

import pytest
from pydantic import ValidationError

from encore import catalogue, configuration, job, launchers, paths
from encore.lab.submissions import mapping, reproduction, shell_values

SAMPLES = paths.ROOT / "tests" / "samples"
NOT_SET = mapping.common().left_out


@dataclass(frozen=True)
class Submitted:
    """One submitted configuration, as the scripts have it."""

    choice: catalogue.Choice
    round: str
    ours: catalogue.System
    config: str
    implementation: mapping.Implementation
    options: dict[str, mapping.Option]
    environment: dict[str, dict[str, str]]  # By the file that has the last word


def assignments(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def effective(tables: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    later: set[str] = set()
    found = {}
    for file in sorted(tables, key=lambda file: (file == "Dockerfile", "_common" in file, file != "run_and_time.sh")):
        found[file] = {name: value for name, value in tables[file].items() if name not in later}
        later |= set(tables[file])
    return found


@cache
def submitted() -> list[Submitted]:
    table = catalogue.read_toml(SAMPLES / "submitted_configurations.toml")
    found = []
    for each in table["submission"]:
        for entry in each["configuration"]:
            command = tuple(shell_values.Value(word) for word in shlex.split(entry["command"]))
            programs = {word.text.rpartition("/")[2] for word in command}
            name, implementation = next(
                (name, known) for name, known in mapping.of_folder(each["folder"]) if programs & set(known.program)
            )
            choice, round_name = catalogue.choose(name), each["repository"].rpartition("_")[2]
            source = {each["folder"], round_name}
            ours = next(
                system
                for system in catalogue.systems(choice)
                if system.system == entry["system"] and all(part in system.source for part in source)
            )
            scripts = {"Dockerfile": each["dockerfile"], **entry.get("environment", {})}
            environment = effective({file: assignments(text) for file, text in scripts.items()})
            options = mapping.options_of(command, implementation.pairs_after)
            found.append(Submitted(choice, round_name, ours, entry["config"], implementation, options, environment))
    return found


def resolved(system: catalogue.System, choice: catalogue.Choice) -> configuration.Configuration:
    return configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])


def mapped(each: Submitted) -> list[mapping.Mapped]:
    # Our keys with the values of the executed command, by the mapping of `encore reproduce`
    nodes, gpus, own = each.ours.nodes, each.ours.gpus_per_node, each.choice.implementation_name
    facts = {"round": each.round, "configuration": each.config, "nodes": nodes, "gpus": gpus, "ranks": nodes * gpus}
    variables = {name: shell_values.Value(text) for file in each.environment.values() for name, text in file.items()}
    found, missing = mapping.map_options(each.implementation, own, each.options, facts, variables)
    assert not missing
    return found


def test_systems_have_the_submitted_values_and_none_from_elsewhere() -> None:
    # Not a case for each: the workers of pytest-xdist would read all scripts before the first test
    for each in submitted():
        place = f"{each.choice.name}, {each.round}, {each.ours.system}"
        found, expected = resolved(each.ours, each.choice), mapped(each)
        assert {key.key: found.get(key.key) for key in expected} == {key.key: key.value for key in expected}, place
        assert set(each.ours.config) <= {key.key for key in expected}, place
        assert each.ours.keep_global_batch == each.implementation.keep_global_batch, place
        # An option is a key, or it is stated what it means that it is none.
        left = reproduction.left_options(each.options, expected, each.implementation.without, mapping.common())
        assert each.round > "v1" or not [option.name for option in left if not option.meaning], place
        tables = each.environment.items()
        wanted = {file: {n: v for n, v in variables.items() if n not in NOT_SET} for file, variables in tables}
        assert each.ours.environment == {file: variables for file, variables in wanted.items() if variables}, place
        # Minigo's save all of theirs with each generation's model (run() in train.py of v0.7).
        assert each.choice.name == "minigo" or found.get("checkpoint_interval") == 0, place
        assert not found.is_submitted or "auto" not in found.plain().values(), f"{place}: a measurement would choose"


def test_every_system_that_was_submitted_is_compared() -> None:
    compared = {(each.choice.name, each.ours.file) for each in submitted()}
    ours = {
        (choice.name, system.file)
        for choice in {each.choice.name: each.choice for each in submitted()}.values()
        for system in catalogue.systems(choice)
        if system.kind in ("submitted", "later")
    }
    assert compared == ours


def environment_of(name: str, system: str, *settings: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    choice = catalogue.choose(name)
    found = catalogue.find_system(choice, system, None)
    made = configuration.resolve(choice, found, found.nodes, found.gpus_per_node, list(settings))
    return job.rank_environment(made, launchers.Launch("horovodrun"), extra or {}, 16)


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
def test_ranks_get_the_environment_of_their_system_and_framework(
    name: str, system: str, settings: tuple[str, ...], variable: str, expected: str | None
) -> None:
    assert environment_of(name, system, *settings).get(variable) == expected
    assert environment_of(name, system, *settings, extra={variable: "7"})[variable] == "7", "the user's comes last"


def test_a_cpu_gets_no_variables_of_gpus() -> None:
    found = environment_of("resnet", "dgx1", "device=cpu", "precision=fp32", "layout=NCHW")
    assert set(found) == {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"}


def test_a_variable_set_twice_is_refused() -> None:
    given = catalogue.systems(catalogue.choose("resnet"))[-1].model_dump()
    twice = {"Dockerfile": {"OMP_NUM_THREADS": "1"}, "run.sh": {"OMP_NUM_THREADS": "2"}}
    with pytest.raises(ValidationError, match="set twice: OMP_NUM_THREADS"):
        catalogue.System.model_validate({**given, "environment": twice})


@pytest.mark.parametrize(
    ("family", "source"), [("v100", "dgx2"), ("a100", "dgxa100"), ("h100", "dgxa100"), ("h200", "dgxa100")]
)
def test_a_system_for_one_gpu_follows_a_submission_in_proportion(family: str, source: str) -> None:
    choice = catalogue.choose("resnet")
    whole = resolved(catalogue.find_system(choice, source, "v0.7"), choice)
    rate = whole.get("learning_rate") / (whole.get("batch_size") * whole.ranks)
    found = [s for s in catalogue.systems(choice) if s.kind == "derived" and s.system.startswith(family)]
    assert found
    for system in found:
        one = resolved(system, choice)
        assert one.get("learning_rate") == pytest.approx(rate * one.get("batch_size"), rel=1e-4)
        same = ("optimizer", "epochs", "warmup_epochs", "weight_decay", "momentum", "schedule")
        assert [one.get(name) for name in same] == [whole.get(name) for name in same]
        assert (one.is_submitted, one.division) == (False, "open")


@pytest.mark.parametrize("name", catalogue.choices())
def test_every_system_runs_on_another_number_of_gpus(name: str) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        found = configuration.resolve(choice, system, 1, 2 * system.gpus_per_node, [])
        assert found.get("batch_size") >= 1 and found.get("learning_rate") > 0
