"""What an image is asked for before it is pulled and before a run: what was seen to work, and what was submitted."""

import dataclasses
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, configuration
from encore.catalogue import System
from encore.configuration import Configuration
from encore.containers import building, checks, compatibility, images
from encore.containers.engines import Engine, Image
from encore.containers.runtimes import ON_HOST, Target
from encore.errors import EncoreError
from encore.machine import node, pythons
from encore.machine.pythons import Facts
from tests.conftest import Encore
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
    assert check.level == "FAIL" and "no implementation of resnet runs on Blackwell yet" in check.hint
    assert re.search(r"NVIDIA B200 is Blackwell \(10\.0\).*mxnet images end at Hopper", check.found)


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
    fits, check = (compatibility.check_memory(resolved, gpus(name)[0]) for name in ("a100", "v100"))
    assert (fits.level, check.level) == ("OK", "WARN")
    assert check.hint == f"if it does not fit: --set batch_size={resolved.get('batch_size') * 16 // 40}"


@pytest.mark.parametrize(
    ("name", "release", "found", "hint"),
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
def test_a_release_that_is_too_old_is_refused_before_a_pull(name: str, release: str, found: str, hint: str) -> None:
    choice = catalogue.choose(name)
    asked: list[str] = []
    engine = Engine(name="docker", program="docker")
    with pytest.raises(EncoreError, match=f"(?s){re.escape(found)}.*hint: .*{re.escape(hint)}"):
        building.build(choice, engine, release, True, asked.append)
    assert asked == []


@pytest.mark.parametrize("name", catalogue.choices())
def test_a_default_release_is_not_too_old(name: str) -> None:
    choice = catalogue.choose(name)
    assert compatibility.too_old(images.find_release(choice.implementation.framework), choice) is None


def test_releases_of_two_series_have_no_order() -> None:
    choice = catalogue.choose("minigo")
    older = images.find_release("tensorflow", "25.02-tf2").model_copy(update={"release": "22.05-tf2"})
    assert compatibility.too_old(older, choice) is None


@pytest.mark.parametrize("name", catalogue.choices())
def test_what_an_implementation_needs_was_seen(name: str) -> None:
    # Each lowest version is that of a training that was tried, and with an older one that was tried it failed
    needs = catalogue.choose(name).implementation.needs
    assert catalogue.choose(name).implementation.framework in needs
    for package, least in needs.items():
        with_it = [each for each in compatibility.tried() if each.implementation == name and package in each.versions]
        lowest = compatibility.version(least)
        seen = [each for each in with_it if compatibility.version(each.versions[package])[: len(lowest)] == lowest]
        assert any(not each.problem for each in seen), f"{package} {least} was not tried"
        older = [each for each in with_it if compatibility.version(each.versions[package])[: len(lowest)] < lowest]
        assert all(each.problem for each in older), f"{package} older than {least} did train"


@pytest.mark.slow
def test_a_run_in_an_image_that_is_too_old_is_refused() -> None:
    choice = catalogue.choose("ncf")
    resolved = configuration.resolve(choice, catalogue.find_system(choice, "cpu", None), 1, 1, [])
    base = {"org.opencontainers.image.base.name": "nvcr.io/nvidia/pytorch:20.06-py3"}
    image = Image(id="sha256:1", labels=base, user="1", digests=(), bytes=1)
    target = Target(runtime="docker", image="own:1", found=image)
    assert [c.found for c in checks.check(target, resolved, node.this_node(), []) if c.level == "FAIL"] == [
        "nvcr.io/nvidia/pytorch:20.06-py3 is too old for ncf: Python 3.6, 3.8 needed"
    ]
    # An image of the user's has no such label: its Python has answered.
    facts = Facts(
        python="3.8.10", problems={}, packages={"torch": "1.11.0a0+b6df043"}, cuda="11.5", gpus=1, mpirun=False,
        horovod=0, check_build="",
    )  # fmt: skip
    image = dataclasses.replace(image, labels={"org.opencontainers.image.base.name": "own:0"})
    own = Target(runtime="docker", image="own:1", found=image, facts=facts)
    found = [c.found for c in checks.check(own, resolved, node.this_node(), []) if c.level == "FAIL"]
    least = choice.implementation.needs["pytorch"]
    assert found == [f"own:1 is too old for ncf: PyTorch 1.11.0a0+b6df043, {least} needed"]


def test_a_python_that_cannot_read_the_question_reports_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python 3.6 refuses `from __future__ import annotations` before anything runs
    said: list[str] = []
    monkeypatch.setattr(sys, "version_info", (3, 6, 9, "final", 0))
    exec(pythons.program(), {"print": said.append})
    answer = pythons.parse("\n".join(said))
    assert answer is not None and answer.python == "3.6.9"
    assert "annotations" not in pythons.GUARD


BASE = "org.opencontainers.image.base.name"


def resolved(name: str, system: str = "dgxa100") -> Configuration:
    choice = catalogue.choose(name)
    found = catalogue.find_system(choice, system, None)
    return configuration.resolve(choice, found, found.nodes, found.gpus_per_node, [])


def on(base: str) -> Target:
    image = Image(id="id", digests=(), labels={BASE: base}, user="", bytes=0)
    return replace(ON_HOST, runtime="docker", image="bert:1", found=image)


def of_own_framework(name: str) -> list[System]:
    choice = catalogue.choose(name)
    own = ("", choice.implementation.framework)
    return [each for each in catalogue.systems(choice) if each.kind == "submitted" and each.framework in own]


def test_every_submitted_system_names_the_image_that_it_was_submitted_in() -> None:
    counted = 0
    for name, choice in catalogue.choices().items():
        for system in of_own_framework(name):
            if system.submitter != "NVIDIA" or name != choice.benchmark.name:
                continue
            (image,) = [each for each in images.differences(choice, system) if each.what == "image"]
            assert image.submitted.startswith("nvcr.io/nvidia/") and image.rounds == (system.round,), system.file
            assert image.here == images.find_release(choice.implementation.framework).reference
            counted += 1
    assert counted > 100


def test_the_image_of_the_run_is_compared() -> None:
    def said(target: Target) -> dict[str, str]:
        return {each.name: each.found for each in checks.check_as_submitted(target, resolved("bert"))}

    assert set(said(ON_HOST)) == {"training text", "evaluation text", "image"}
    assert said(ON_HOST)["image"] == "not as submitted, nvcr.io/nvidia/pytorch:20.06-py3, but the host's Python"
    assert said(on("nvcr.io/nvidia/pytorch:25.12-py3"))["image"].endswith("but nvcr.io/nvidia/pytorch:25.12-py3")
    assert "image" not in said(on("nvcr.io/nvidia/pytorch:20.06-py3"))
    assert "wiki_test_set_md5.txt" in said(ON_HOST)["evaluation text"]


@pytest.mark.parametrize("system", ["cpu", "gpu", "h200-141gb"])
def test_what_was_not_submitted_differs_from_nothing(system: str) -> None:
    assert checks.check_as_submitted(ON_HOST, resolved("bert", system)) == []


def test_parts_hold_for_their_rounds() -> None:
    choice = catalogue.choose("transformer")
    for round_name, parts in (("v0.5", ["text", "image"]), ("v0.7", ["image"])):
        found = images.differences(choice, catalogue.find_system(choice, "dgx1", round_name))
        assert [each.what for each in found] == parts


def test_a_dry_run_and_show_say_so(encore: Encore, tmp_path: Path) -> None:
    # A toy data set in the checkout would be a difference of its own.
    said = encore("run", "gnmt", "8", "--system", "dgxa100", "--data", str(tmp_path / "none"), "--dry-run").stdout
    assert "every value as submitted" in said
    assert "WARN BLEU: not as submitted, sacreBLEU 1.2.10" in said and "WARN image: not as submitted" in said
    shown = json.loads(encore("show", "maskrcnn", "--system", "dgxa100", "--json").stdout)
    assert shown["weights"]["backbone"]["checksums"] == {"md5": ["b19105fdd7baafb40480251377de18f2"]}
    assert [each["what"] for each in shown["not_as_submitted"]] == ["image"]
    assert "R-50.pkl" in encore("show", "maskrcnn", "--system", "dgxa100").stdout
