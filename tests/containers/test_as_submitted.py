"""What of a submitted system is not as submitted: on its benchmark's page, in ``encore show`` and before a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, configuration
from encore.catalogue import System
from encore.configuration import Configuration
from encore.containers import checks, images
from encore.containers.engines import Image
from encore.containers.runtimes import ON_HOST, Target
from tests.conftest import Encore

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
