"""The model of GPU memory against what was published to fit, and what is said before a run.

What PyTorch keeps is compared in tests/in_framework/pytorch/resnet.py.
"""

import dataclasses
from typing import Any

import pytest

from encore import catalogue
from encore import configuration as configurations
from encore.configuration import Configuration
from encore.containers import compatibility
from encore.containers.checks import check
from encore.containers.runtimes import Target
from encore.machine import node
from encore.machine.node import Gpu


def configured(name: str, *settings: str, system: str = "dgxa100") -> Configuration:
    choice = catalogue.choose(name)
    return configurations.resolve(choice, catalogue.find_system(choice, system, "v0.7"), 1, 8, list(settings))


def gpu(gib: float) -> Gpu:
    return Gpu(index=0, name="NVIDIA X", memory_gib=gib, driver="550.54", compute_capability="8.0")


def needed(configuration: Configuration) -> Any:
    model = configurations.memory_model(configuration.choice.folder)
    assert model is not None
    return compatibility._needed(model, configuration, {})


@pytest.mark.parametrize(
    ("name", "batch", "precision", "gib"),
    [
        # Submitted: config_DGX1.sh of v0.6, config_DGXA100.sh of v0.7.
        ("resnet", 208, "fp16", 15.8),
        ("resnet", 408, "fp16", 39.6),
        # NVIDIA/DeepLearningExamples: PyTorch/Classification/ConvNets/configs.yml, DGX-1 with 16 GB and DGX-2 with 32.
        ("resnet-pytorch", 256, "fp16", 15.8),
        ("resnet-pytorch", 112, "fp32", 15.8),
        ("resnet-pytorch", 256, "fp32", 31.7),
        # TensorFlow/Classification/ConvNets/resnet50v1.5/README.md, DGX-1 with 16 GB.
        ("resnet-tensorflow", 256, "fp16", 15.8),
        ("resnet-tensorflow", 128, "fp32", 15.8),
    ],
)
def test_what_was_run_elsewhere_fits(name: str, batch: int, precision: str, gib: float) -> None:
    resolved = configured(name, f"batch_size={batch}", f"precision={precision}", "dali_prefetch=3")
    assert compatibility.check_memory(resolved, gpu(gib)).level == "OK"


def test_too_large_a_batch_is_refused_with_what_fits() -> None:
    found = compatibility.check_memory(configured("resnet", "batch_size=1024"), gpu(39.6))
    assert (found.level, "39.6 GiB" in found.found) == ("FAIL", True)
    assert f"about {sum(needed(configured('resnet', 'batch_size=1024'))) / 2**30:.1f} GiB needed" in found.found
    setting = found.hint.removeprefix("--set ").partition(",")[0]
    assert setting.startswith("batch_size=")
    assert compatibility.check_memory(configured("resnet", setting), gpu(39.6)).level == "OK"
    more = f"batch_size={int(setting.partition('=')[2]) + 1}"
    assert compatibility.check_memory(configured("resnet", more), gpu(39.6)).level == "WARN"


def test_near_the_limit_is_a_warning_and_an_unknown_memory_none() -> None:
    resolved = configured("resnet-pytorch", "precision=fp32")
    assert compatibility.check_memory(resolved, gpu(39.6)).level == "WARN"
    assert compatibility.check_memory(resolved, gpu(0.0)).level == "OK"
    assert compatibility.check_memory(resolved, gpu(79.0)).level == "OK"


def test_accumulation_comes_first_where_an_implementation_has_it() -> None:
    found = compatibility.check_memory(configured("resnet-pytorch", "batch_size=1024"), gpu(39.6))
    assert found.hint == "--set accumulation_steps=2, which keeps the global batch"
    found = compatibility.check_memory(configured("resnet", "batch_size=1024"), gpu(39.6))
    assert found.hint.endswith("another global batch")


def test_a_run_on_gpus_of_the_host_is_checked_too() -> None:
    resolved = configured("resnet-pytorch", "batch_size=4096")
    target = Target(python=catalogue.paths.ROOT / "python")
    found = {
        each.name: each.level
        for each in check(target, resolved, dataclasses.replace(node.this_node(), gpus=(gpu(80.0),)), [])
    }
    assert found["GPU memory"] == "FAIL"
