"""The gate: what a machine is checked for before an image is pulled."""

from __future__ import annotations

import pytest

from encore import catalogue, configuration, paths
from encore.containers import compatibility, images
from encore.machine.node import Gpu, parse_nvidia_smi

BENCHMARK = catalogue.choose("resnet").benchmark


def gpus(name: str) -> tuple[Gpu, ...]:
    return parse_nvidia_smi((paths.ROOT / "tests" / "samples" / "gpus" / f"{name}.csv").read_text(encoding="utf-8"))


def levels(machine: str, release: str) -> dict[str, str]:
    found = compatibility.check_gpus(images.find_release("mxnet", release), gpus(machine), BENCHMARK)
    worst: dict[str, str] = {}
    for check in found:
        worst[check.name] = max(worst.get(check.name, "OK"), check.level, key=("OK", "WARN", "FAIL").index)
    return worst


@pytest.mark.parametrize("machine", ["v100", "a100", "h100", "h200"])
def test_everything_up_to_hopper_runs_the_last_mxnet_image(machine: str) -> None:
    assert levels(machine, "24.06") == {"compute capability": "OK", "driver": "OK"}
    assert len(gpus(machine)) == 8


def test_blackwell_without_an_image_is_refused() -> None:
    release = images.find_release("mxnet", "24.06")
    check = compatibility.check_gpus(release, gpus("b200"), BENCHMARK)[0]
    assert check.level == "FAIL"
    assert "NVIDIA B200 is Blackwell (10.0)" in check.found
    assert "mxnet images end at Hopper" in check.found
    assert "no implementation of resnet runs on Blackwell yet" in check.remedy


def test_another_implementation_is_named_for_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = catalogue.choose("resnet")
    able = catalogue.Implementation(framework="pytorch", module="benchmarks.resnet.pytorch")
    implementations = {**choice.benchmark.implementations, "pytorch": able}
    benchmark = choice.benchmark.model_copy(update={"implementations": implementations})
    known = {"resnet-pytorch": catalogue.Choice(benchmark, "pytorch")}
    monkeypatch.setattr(catalogue, "choices", lambda: known)
    release = images.find_release("pytorch", "25.12").model_copy(update={"architectures": ("Blackwell",)})
    content = images.catalogue().model_copy(update={"release": (release,)})
    remedy = compatibility.alternatives(benchmark, content, gpus("b200")[0])
    assert remedy == "use resnet-pytorch on release 25.12, which runs on Blackwell"


def test_mixed_machine_fails_for_the_gpu_that_cannot() -> None:
    checks = compatibility.check_gpus(images.find_release("mxnet", "24.06"), gpus("mixed"), BENCHMARK)
    capability = [check for check in checks if check.name == "compute capability"]
    assert [check.level for check in capability] == ["OK", "FAIL"]


def test_older_image_on_a_newer_gpu() -> None:
    assert levels("h100", "22.05")["compute capability"] == "FAIL"
    assert levels("a100", "22.05")["compute capability"] == "OK"


def test_code_runs_on_later_gpus_of_the_same_generation() -> None:
    assert levels("rtx3090", "22.05")["compute capability"] == "OK"


def test_driver_branches_are_for_data_center_gpus_alone() -> None:
    assert levels("v100", "24.06")["driver"] == "OK"
    assert levels("rtx3090", "24.06")["driver"] == "FAIL"
    assert levels("v100_old_driver", "24.06")["driver"] == "FAIL"


def test_unknown_facts_warn_and_never_pass_silently() -> None:
    assert levels("v100", "19.05") == {"compute capability": "WARN", "driver": "WARN"}
    assert levels("v100_ancient", "24.06")["compute capability"] == "WARN"


def test_less_memory_than_submitted_offers_a_smaller_batch() -> None:
    choice = catalogue.choose("dlrm")
    resolved = configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 8, [])
    assert compatibility.check_memory(resolved, gpus("a100")[0]).level == "OK"
    check = compatibility.check_memory(resolved, gpus("v100")[0])
    assert check.level == "WARN"
    assert check.remedy == f"if it does not fit: --set batch_size={resolved.get('batch_size') * 16 // 40}"
