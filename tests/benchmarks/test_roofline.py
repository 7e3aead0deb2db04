"""Counts of a step against what is known of the networks, ceilings, and tables of kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import paths

NAMES = paths.ROOT / "tests" / "samples" / "kernel_names.json"


@pytest.fixture(scope="module")
def found(in_pytorch: Callable[..., str]) -> dict[str, Any]:
    """What tests/in_framework/roofline.py found."""
    result: dict[str, Any] = json.loads(in_pytorch("roofline.py").splitlines()[-1])
    return result


def test_forward_pass_of_an_image_has_the_known_operations(found: dict[str, Any]) -> None:
    """4.1 G multiply-adds at 224 x 224 (He et al. 2015 count 3.8 G with the stride in the first of three layers)."""
    assert found["resnet"]["flops"] / 2 == pytest.approx(8.2e9, rel=0.02)
    assert found["resnet"]["uncounted"] == []


def test_step_on_text_has_six_operations_a_parameter_and_token(found: dict[str, Any]) -> None:
    """BERT-Large: 6 x parameters x tokens, the head on masked words alone, and attention's own products."""
    cost, width, vocabulary = found["bert"], 1024, 30528
    assert cost["layers"] == 24 * 12 * width**2
    per_token = 6 * cost["layers"] + 12 * 24 * width * 512
    head = 6 * ((width**2 + vocabulary * width) * cost["masked"] + 2 * width**2)
    assert cost["flops"] == pytest.approx(per_token * cost["tokens"] + head, rel=0.02)
    assert cost["uncounted"] == []


def test_bytes_are_what_operators_read_and_write(found: dict[str, Any]) -> None:
    """A product of (64, 128) by (128, 128) reads 24,576 values and writes 8,192; its gradient of the weight as many."""
    flops, moved = found["small"]["by_class"]["matrix products"]
    assert flops == 2 * 2 * 64 * 128 * 128
    assert moved == 4 * (24_576 + 8_192) * 2
    assert sum(each[1] for each in found["small"]["by_class"].values()) == found["small"]["moved"]


def test_ceilings_are_measured(found: dict[str, Any]) -> None:
    assert found["peak"] > 1e8
    assert all(value > 1e8 for value in found["bytes"].values())


def test_shares_of_the_classes_add_up(found: dict[str, Any]) -> None:
    table = found["kernels"]
    assert sum(table["classes"].values()) == pytest.approx(1.0)
    assert table["classes"]["matrix products"] > 0
    assert sum(row["seconds"] for row in table["kernels"]) == pytest.approx(table["busy_seconds"])
    assert next(row for row in table["kernels"] if row["name"] == "aten::mm")["calls"] == 2


def test_kernels_are_known_by_their_names(found: dict[str, Any]) -> None:
    """The first ones are kernels that the study prints."""
    assert found["names"] == json.loads(NAMES.read_text(encoding="utf-8"))


def test_two_ranks_measure_what_they_exchange(in_pytorch: Callable[..., str], tmp_path: Path) -> None:
    result = tmp_path / "links.json"
    in_pytorch("link_speeds.py", str(result), ranks=2)
    measured = json.loads(result.read_text(encoding="utf-8"))
    assert (measured["ranks"], measured["backend"]) == (2, "gloo")
    assert [[value is None for value in row] for row in measured["pairs"]] == [[True, False], [False, True]]
    for row, share in zip(measured["collectives"], (1.0, 0.5), strict=True):
        assert row["rate"] == pytest.approx(share * row["bytes"] / row["seconds"])
