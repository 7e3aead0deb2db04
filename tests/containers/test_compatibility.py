"""Compatibility of images with GPUs, drivers and implementations, and with the images of submissions."""

import re
import sys
from dataclasses import replace

import pytest

from encore import catalogue, configuration
from encore.configuration import Configuration
from encore.containers import building, checks, compatibility, images
from encore.containers.engines import Engine, Image
from encore.containers.runtimes import ON_HOST, Target
from encore.errors import EncoreError
from encore.machine import node, pythons
from tests.machine.machines import gpus_of

BENCHMARK = catalogue.choose("resnet").benchmark
BASE = "org.opencontainers.image.base.name"


def resolve(name: str, system: str = "dgxa100") -> Configuration:
    choice = catalogue.choose(name)
    entry = catalogue.find_system(choice, system, None)
    return configuration.resolve(choice, entry, entry.nodes, entry.gpus_per_node, [])


def target_on(base: str) -> Target:
    image = Image(id="id", digests=(), labels={BASE: base}, user="1", bytes=1)
    return replace(ON_HOST, runtime="docker", image="own:1", found=image)


@pytest.mark.parametrize(
    ("machine", "release", "capability", "driver"),
    [
        # The last image runs up to Hopper; older driver branches support data center GPUs only.
        ("v100", "24.06", "OK", "OK"),
        ("a100", "24.06", "OK", "OK"),
        ("h100", "24.06", "OK", "OK"),
        ("h200", "24.06", "OK", "OK"),
        ("rtx3090", "24.06", "OK", "FAIL"),
        ("v100_old_driver", "24.06", "OK", "FAIL"),
        # Code runs on later GPUs of its generation, not on the next generation.
        ("a100", "22.05", "OK", "OK"),
        ("rtx3090", "22.05", "OK", "OK"),
        ("h100", "22.05", "FAIL", "OK"),
        # Missing facts are warnings.
        ("v100", "19.05", "WARN", "WARN"),
        ("v100_ancient", "24.06", "WARN", "FAIL"),
    ],
)
def test_machines_and_releases(machine: str, release: str, capability: str, driver: str) -> None:
    results = compatibility.check_gpus(images.find_release("mxnet", release), gpus_of(machine), BENCHMARK)
    assert [(check.name, check.level) for check in results] == [("compute capability", capability), ("driver", driver)]


def test_each_gpu_of_a_mixed_machine_is_checked() -> None:
    results = compatibility.check_gpus(images.find_release("mxnet", "24.06"), gpus_of("mixed"), BENCHMARK)
    assert [check.level for check in results] == ["OK", "OK", "FAIL", "OK"]


def test_blackwell_without_an_image_is_refused() -> None:
    check, _ = compatibility.check_gpus(images.find_release("mxnet", "24.06"), gpus_of("b200"), BENCHMARK)
    assert check.level == "FAIL" and "no implementation of resnet runs on Blackwell yet" in check.hint
    assert re.search(r"NVIDIA B200 is Blackwell \(10\.0\).*mxnet images end at Hopper", check.found)


def test_hint_for_blackwell_names_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = catalogue.Implementation(framework="pytorch", module="benchmarks.resnet.pytorch")
    implementations = {**BENCHMARK.implementations, "pytorch": implementation}
    benchmark = BENCHMARK.model_copy(update={"implementations": implementations})
    monkeypatch.setattr(catalogue, "choices", lambda: {"resnet-pytorch": catalogue.Choice(benchmark, "pytorch")})
    release = images.find_release("pytorch", "25.12").model_copy(update={"architectures": ("Blackwell",)})
    content = images.catalogue().model_copy(update={"release": (release,)})
    hint = compatibility.alternatives(benchmark, content, gpus_of("b200")[0])
    assert hint == "use resnet-pytorch on release 25.12, which runs on Blackwell"


def test_less_memory_than_submitted_offers_a_smaller_batch() -> None:
    resolved = resolve("dlrm")
    large, small = (compatibility.check_memory(resolved, gpus_of(name)[0]) for name in ("a100", "v100"))
    assert (large.level, small.level) == ("OK", "WARN")
    assert small.hint == f"if it does not fit: --set batch_size={resolved.get('batch_size') * 16 // 40}"


@pytest.mark.parametrize(
    ("name", "release", "message", "hint"),
    [
        ("resnet", "20.06", "Python 3.6, 3.8 needed", "release 24.05"),
        ("resnet", "22.05", "DALI 1.13.0, 1.35 needed", "release 24.05"),
        ("ncf", "18.11", "19.05 is later and has Python 3.6", "release 24.10"),
        ("dlrm", "20.06", "Python 3.6", "release 24.10"),
        ("bert-squad", "21.11", "PyTorch 1.11.0a0+b6df043", "release 24.10"),
        ("minigo", "20.06-tf1", "Python 3.6", "release 25.02-tf2"),
        ("minigo", "23.03-tf1", "TensorFlow 1.15.5", "release 25.02-tf2"),
    ],
)
def test_too_old_release_is_refused_before_the_pull(name: str, release: str, message: str, hint: str) -> None:
    lines: list[str] = []
    engine = Engine(name="docker", program="docker")
    with pytest.raises(EncoreError, match=f"(?s){re.escape(message)}.*hint: .*{re.escape(hint)}"):
        building.build(catalogue.choose(name), engine, release, True, lines.append)
    assert lines == []


def test_releases_of_two_series_are_not_compared() -> None:
    release = images.find_release("tensorflow", "25.02-tf2").model_copy(update={"release": "22.05-tf2"})
    assert compatibility.too_old(release, catalogue.choose("minigo")) is None


@pytest.mark.parametrize("name", catalogue.choices())
def test_minimum_versions_are_those_of_recorded_runs(name: str) -> None:
    # A run with the minimum succeeded, and runs with older versions failed
    needs = catalogue.choose(name).implementation.needs
    assert catalogue.choose(name).implementation.framework in needs
    for package, text in needs.items():
        minimum = compatibility.version(text)
        runs = [run for run in compatibility.tried() if run.implementation == name and package in run.versions]
        versions = [compatibility.version(run.versions[package])[: len(minimum)] for run in runs]
        working = [version for version, run in zip(versions, runs, strict=True) if not run.problem]
        assert min(working) == minimum, f"{package} {text}"


@pytest.mark.slow
def test_run_in_a_too_old_image_is_refused() -> None:
    resolved = resolve("ncf", "cpu")
    # Without a label of NVIDIA's base, the versions come from the Python in the image.
    facts = pythons.Facts(
        python="3.8.10", problems={}, packages={"torch": "1.11.0a0+b6df043"}, cuda="11.5", gpus=1, mpirun=False,
        horovod=0, check_build="",
    )  # fmt: skip
    minimum = catalogue.choose("ncf").implementation.needs["pytorch"]
    for target, message in (
        (target_on("nvcr.io/nvidia/pytorch:20.06-py3"), "Python 3.6, 3.8 needed"),
        (replace(target_on("own:0"), facts=facts), f"PyTorch 1.11.0a0+b6df043, {minimum} needed"),
    ):
        results = checks.check(target, resolved, node.this_node(), [])
        image = "own:1" if target.facts else "nvcr.io/nvidia/pytorch:20.06-py3"
        assert [c.found for c in results if c.level == "FAIL"] == [f"{image} is too old for ncf: {message}"]


def test_python_3_6_reports_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # It rejects `from __future__ import annotations` before it runs anything
    lines: list[str] = []
    monkeypatch.setattr(sys, "version_info", (3, 6, 9, "final", 0))
    exec(pythons.program(), {"print": lines.append})
    answer = pythons.parse("\n".join(lines))
    assert answer is not None and answer.python == "3.6.9"
    assert "annotations" not in pythons.GUARD


def test_image_of_the_run_is_compared_with_the_submission() -> None:
    submitted, later = "nvcr.io/nvidia/pytorch:20.06-py3", "nvcr.io/nvidia/pytorch:25.12-py3"
    on_host, same, other = (
        {check.name: check.found for check in checks.check_as_submitted(target, resolve("bert"))}
        for target in (ON_HOST, target_on(submitted), target_on(later))
    )
    assert (set(on_host), set(same)) == ({"training text", "evaluation text", "image"}, set(on_host) - {"image"})
    assert on_host["image"] == f"not as submitted, {submitted}, but the host's Python"
    assert other["image"] == f"not as submitted, {submitted}, but {later}"
    assert "wiki_test_set_md5.txt" in on_host["evaluation text"]


@pytest.mark.parametrize("system", ["cpu", "gpu", "h200-141gb"])
def test_system_without_a_submission_has_no_differences(system: str) -> None:
    assert checks.check_as_submitted(ON_HOST, resolve("bert", system)) == []


@pytest.mark.parametrize(("round_name", "parts"), [("v0.5", ["text", "image"]), ("v0.7", ["image"])])
def test_differences_belong_to_a_round(round_name: str, parts: list[str]) -> None:
    choice = catalogue.choose("transformer")
    differences = images.differences(choice, catalogue.find_system(choice, "dgx1", round_name))
    assert [part.what for part in differences] == parts
