"""`encore run resnet 2` on a machine with GPUs and no ImageNet: the toy data set, on which device, and why."""

import dataclasses
import json
from pathlib import Path

import pytest

from encore import catalogue
from encore.containers import runtimes
from encore.errors import EncoreError
from encore.machine import node
from encore.run import passport, planning
from tests.machine.machines import PACKAGES, answered, gpus_of

CHOICE = catalogue.choose("resnet-pytorch")
WITHOUT = "no imagenet here: trains the toy data set, digits,"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[node.Gpu, ...]:
    # A machine with eight H100 and an empty data folder
    found = gpus_of("h100")
    here = dataclasses.replace(node.this_node(), gpus=found)
    monkeypatch.setattr(node, "this_node", lambda: here)
    monkeypatch.setattr(planning.paths, "default_data", lambda name: tmp_path / "data" / name)
    return found


def plan(**given: object) -> planning.Plan:
    request = {"name": CHOICE.name, "gpus": 2, **given}
    return planning.make_plan(planning.Request(**request))  # type: ignore[arg-type]


@pytest.mark.parametrize(("seed", "is_taken"), [(-1, False), (0, True), (2**31 - 1, True), (2**31, False)])
def test_a_seed_has_31_bits(seed: int, is_taken: bool) -> None:
    if is_taken:
        assert plan(system="cpu", seed=seed).seeds == (seed,)
    else:
        with pytest.raises(EncoreError, match="0 to 2147483647"):
            plan(system="cpu", seed=seed)


@pytest.mark.parametrize("name", ["resnet", "bert", "dlrm"])
def test_a_server_gets_a_system_of_one_node(name: str, gpus: tuple[node.Gpu, ...], tmp_path: Path) -> None:
    # Of as many nodes as it has, though systems of several have the same GPUs
    assert plan(name=name, gpus=len(gpus), data=tmp_path).configuration.system.nodes == 1


def levels(found: planning.Plan) -> dict[str, str]:
    return {check.name: check.level for check in planning.checks(found)}


def test_the_gpus_train_it_in_a_python_with_cuda(gpus: tuple[node.Gpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    has_cuda = answered(gpus=len(gpus), packages=PACKAGES).facts
    monkeypatch.setattr(runtimes, "_ask_python", lambda python, choice, extra: has_cuda)
    found = planning.asked(plan(python=Path("/apps/bin/python")))
    configuration = found.configuration
    assert configuration.plain() == {**plan(system="cpu").configuration.plain(), "device": "gpu"}
    assert (configuration.system.system, found.makes_small_data, configuration.is_submitted) == ("gpu", True, False)
    assert found.toy_data_set == f"{WITHOUT} on the GPUs (/apps/bin/python)"
    assert "FAIL" not in levels(found).values() and levels(found)["toy data set"] == "WARN"
    assert "never a reproduction" in passport.submission_of(configuration, {"name": "digits"})["text"]


@pytest.mark.parametrize(
    ("given", "reason", "hint"),
    [
        ({}, "the host runtime's pytorch is built for CPUs", "make build-resnet-pytorch"),
        ({"gpus": 16}, "16 GPUs wanted, 8 found", "ask for at most 8"),
        ({"python": Path("/no/python")}, "no Python /no/python", "--python"),
    ],
)
def test_the_cpu_trains_it_where_nothing_can_use_the_gpus(
    gpus: tuple[node.Gpu, ...], given: dict[str, object], reason: str, hint: str
) -> None:
    found = plan(**given)
    why, _, since = found.toy_data_set.partition("since: ")
    assert (found.configuration.system.system, why) == ("cpu", f"{WITHOUT} on the CPU, ")
    assert reason in since and hint in since


def test_what_was_asked_for_is_done_as_before(
    gpus: tuple[node.Gpu, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ({"system": "dgxa100"}, {"data": tmp_path}):
        assert plan(**given).configuration.system.kind != "small" and plan(**given).toy_data_set == ""
    folder = tmp_path / "data" / "resnet"
    (folder / "parts").mkdir(parents=True)
    assert not planning.means_toy_data_set(CHOICE, node.this_node())
    for name, expected in (("imagenet", False), ("digits", True)):
        content = {"schema": 1, "benchmark": "resnet", "name": name, "id": "x", "classes": [], "splits": {}}
        (folder / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
        assert planning.means_toy_data_set(CHOICE, node.this_node()) is expected
    without = dataclasses.replace(node.this_node(), gpus=())
    monkeypatch.setattr(node, "this_node", lambda: without)
    assert plan().toy_data_set == ""


def test_a_run_on_gpus_is_found_again_by_its_systems_name() -> None:
    system = catalogue.find_system(CHOICE, "gpu", None)
    assert (system.kind, system.config["device"], system.file) == ("small", "gpu", "cpu_v0.7.toml")
    assert "gpu" not in {each.system for each in catalogue.systems(CHOICE)}
