"""`encore run resnet 2` with GPUs and without ImageNet: the toy data set, its device and the reason."""

import dataclasses
import json
from pathlib import Path

import pytest

from encore import catalogue
from encore.containers import runtimes
from encore.errors import EncoreError
from encore.machine import node
from encore.run import passport, planning
from tests.conftest import Encore
from tests.machine.machines import PACKAGES, answered, gpus_of

CHOICE = catalogue.choose("resnet-pytorch")
WITHOUT = "no imagenet here: trains the toy data set, digits,"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[node.Gpu, ...]:
    # A machine with eight H100 and an empty data folder
    cards = gpus_of("h100")
    machine = dataclasses.replace(node.this_node(), gpus=cards)
    monkeypatch.setattr(node, "this_node", lambda: machine)
    monkeypatch.setattr(planning.paths, "default_data", lambda name: tmp_path / "data" / name)
    return cards


def plan(**fields: object) -> planning.Plan:
    return planning.make_plan(planning.Request(**{"name": CHOICE.name, "gpus": 2, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_seed_has_31_bits(seed: int) -> None:
    assert plan(system="cpu", seed=seed).seeds == (seed,)
    with pytest.raises(EncoreError, match="0 to 2147483647"):
        plan(system="cpu", seed=-1 if seed == 0 else seed + 1)


def test_experiments_have_consecutive_seeds() -> None:
    assert plan(system="cpu", seed=7, runs=3).seeds == (7, 8, 9)


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_first_command_passes_preflight_without_data(
    name: str, encore: Encore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning.paths, "default_data", lambda name: tmp_path / "data" / name)
    done = encore("run", name, "2", "--dry-run", "--results", str(tmp_path), code=0)
    assert "FAIL" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["resnet", "bert", "dlrm"])
def test_server_gets_a_system_of_one_node(name: str, gpus: tuple[node.Gpu, ...], tmp_path: Path) -> None:
    # Larger systems have the same GPUs
    assert plan(name=name, gpus=len(gpus), data=tmp_path).configuration.system.nodes == 1


def test_gpus_train_the_toy_data_set_in_a_python_with_cuda(
    gpus: tuple[node.Gpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = answered(gpus=len(gpus), packages=PACKAGES).facts
    monkeypatch.setattr(runtimes, "_ask_python", lambda python, choice, extra: facts)
    toy = planning.asked(plan(python=Path("/apps/bin/python")))
    config = toy.configuration
    assert config.plain() == {**plan(system="cpu").configuration.plain(), "device": "gpu"}
    assert (config.system.system, toy.makes_small_data, config.is_submitted) == ("gpu", True, False)
    assert toy.toy_data_set == f"{WITHOUT} on the GPUs (/apps/bin/python)"
    levels = {check.name: check.level for check in planning.checks(toy)}
    assert "FAIL" not in levels.values() and levels["toy data set"] == "WARN"
    assert "never a reproduction" in passport.submission_of(config, {"name": "digits"})["text"]


@pytest.mark.parametrize(
    ("fields", "reason", "hint"),
    [
        ({}, "the host runtime's pytorch is built for CPUs", "make build-resnet-pytorch"),
        ({"gpus": 16}, "16 GPUs wanted, 8 found", "ask for at most 8"),
        ({"python": Path("/no/python")}, "no Python /no/python", "--python"),
    ],
)
def test_cpu_trains_the_toy_data_set_without_usable_gpus(
    gpus: tuple[node.Gpu, ...], fields: dict[str, object], reason: str, hint: str
) -> None:
    toy = plan(**fields)
    device, _, since = toy.toy_data_set.partition("since: ")
    assert (toy.configuration.system.system, device) == ("cpu", f"{WITHOUT} on the CPU, ")
    assert reason in since and hint in since


def test_toy_data_set_does_not_replace_a_requested_one(
    gpus: tuple[node.Gpu, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requested in (plan(system="dgxa100"), plan(data=tmp_path)):
        assert requested.configuration.system.kind != "small" and requested.toy_data_set == ""
    folder = tmp_path / "data" / "resnet"
    (folder / "parts").mkdir(parents=True)
    assert not planning.means_toy_data_set(CHOICE, node.this_node())
    for name, is_toy in (("imagenet", False), ("digits", True)):
        content = {"schema": 1, "benchmark": "resnet", "name": name, "id": "x", "classes": [], "splits": {}}
        (folder / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
        assert planning.means_toy_data_set(CHOICE, node.this_node()) is is_toy
    without = dataclasses.replace(node.this_node(), gpus=())
    monkeypatch.setattr(node, "this_node", lambda: without)
    assert plan().toy_data_set == ""


def test_small_system_on_gpus_is_not_listed() -> None:
    system = catalogue.find_system(CHOICE, "gpu", None)
    assert (system.kind, system.config["device"], system.file) == ("small", "gpu", "cpu_v0.7.toml")
    assert "gpu" not in {system.system for system in catalogue.systems(CHOICE)}
