"""The model of GPU memory, compared with published batch sizes, and its check before a run.

Memory in PyTorch is measured in tests/in_framework/pytorch/resnet.py.
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


def memory_check(name: str, gib: float, *settings: str) -> Any:
    return compatibility.check_memory(configured(name, *settings), gpu(gib))


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
def test_published_batch_sizes_fit(name: str, batch: int, precision: str, gib: float) -> None:
    settings = f"batch_size={batch}", f"precision={precision}", "dali_prefetch=3"
    assert memory_check(name, gib, *settings).level == "OK"


def test_batch_beyond_the_memory_is_refused_with_the_largest_that_fits() -> None:
    refused = memory_check("resnet", 39.6, "batch_size=1024")
    assert (refused.level, refused.found, refused.hint) == (
        "FAIL",
        "about 50.1 GiB needed by the model, NVIDIA X has 39.6 GiB",
        "--set batch_size=755, another global batch",
    )
    levels = [memory_check("resnet", 39.6, f"batch_size={size}").level for size in (755, 756)]
    assert levels == ["OK", "WARN"]
    with_accumulation = memory_check("resnet-pytorch", 39.6, "batch_size=1024").hint
    assert with_accumulation == "--set accumulation_steps=2, which keeps the global batch"


@pytest.mark.parametrize(("gib", "level"), [(39.6, "WARN"), (79.0, "OK"), (0.0, "OK")], ids=["near", "fits", "unknown"])
def test_memory_near_the_limit_is_a_warning(gib: float, level: str) -> None:
    assert memory_check("resnet-pytorch", gib, "precision=fp32").level == level


def test_memory_is_checked_for_runs_on_the_host() -> None:
    machine = dataclasses.replace(node.this_node(), gpus=(gpu(80.0),))
    target = Target(python=catalogue.paths.ROOT / "python")
    results = check(target, configured("resnet-pytorch", "batch_size=4096"), machine, [])
    assert [result.level for result in results if result.name == "GPU memory"] == ["FAIL"]
