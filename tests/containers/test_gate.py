"""The gate: what a machine is checked for before an image is pulled."""

import pytest

from encore import catalogue, configuration
from encore.containers import compatibility, images
from tests.machine.machines import gpus_of as gpus

BENCHMARK = catalogue.choose("resnet").benchmark


@pytest.mark.parametrize(
    ("machine", "release", "capability", "driver"),
    [
        # Everything up to Hopper runs the last image; drivers of older branches are for data center GPUs alone.
        ("v100", "24.06", "OK", "OK"),
        ("a100", "24.06", "OK", "OK"),
        ("h100", "24.06", "OK", "OK"),
        ("h200", "24.06", "OK", "OK"),
        ("rtx3090", "24.06", "OK", "FAIL"),
        ("v100_old_driver", "24.06", "OK", "FAIL"),
        # Code runs on later GPUs of the same generation, and not on those of the next.
        ("a100", "22.05", "OK", "OK"),
        ("rtx3090", "22.05", "OK", "OK"),
        ("h100", "22.05", "FAIL", "OK"),
        # Unknown facts warn, and never pass silently.
        ("v100", "19.05", "WARN", "WARN"),
        ("v100_ancient", "24.06", "WARN", "FAIL"),
    ],
)
def test_machines_and_releases(machine: str, release: str, capability: str, driver: str) -> None:
    found = compatibility.check_gpus(images.find_release("mxnet", release), gpus(machine), BENCHMARK)
    assert [(check.name, check.level) for check in found] == [("compute capability", capability), ("driver", driver)]


def test_blackwell_without_an_image_is_refused() -> None:
    release = images.find_release("mxnet", "24.06")
    check = compatibility.check_gpus(release, gpus("b200"), BENCHMARK)[0]
    assert check.level == "FAIL"
    assert "NVIDIA B200 is Blackwell (10.0)" in check.found
    assert "mxnet images end at Hopper" in check.found
    assert "no implementation of resnet runs on Blackwell yet" in check.hint


def test_another_implementation_is_named_for_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = catalogue.choose("resnet")
    able = catalogue.Implementation(framework="pytorch", module="benchmarks.resnet.pytorch")
    implementations = {**choice.benchmark.implementations, "pytorch": able}
    benchmark = choice.benchmark.model_copy(update={"implementations": implementations})
    known = {"resnet-pytorch": catalogue.Choice(benchmark, "pytorch")}
    monkeypatch.setattr(catalogue, "choices", lambda: known)
    release = images.find_release("pytorch", "25.12").model_copy(update={"architectures": ("Blackwell",)})
    content = images.catalogue().model_copy(update={"release": (release,)})
    hint = compatibility.alternatives(benchmark, content, gpus("b200")[0])
    assert hint == "use resnet-pytorch on release 25.12, which runs on Blackwell"


def test_mixed_machine_fails_for_the_gpu_that_cannot() -> None:
    found = compatibility.check_gpus(images.find_release("mxnet", "24.06"), gpus("mixed"), BENCHMARK)
    assert [check.level for check in found] == ["OK", "OK", "FAIL", "OK"]


def test_less_memory_than_submitted_offers_a_smaller_batch() -> None:
    choice = catalogue.choose("dlrm")
    resolved = configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 8, [])
    assert compatibility.check_memory(resolved, gpus("a100")[0]).level == "OK"
    check = compatibility.check_memory(resolved, gpus("v100")[0])
    assert check.level == "WARN"
    assert check.hint == f"if it does not fit: --set batch_size={resolved.get('batch_size') * 16 // 40}"
