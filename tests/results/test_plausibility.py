"""Speeds above the peak rate of the accelerators."""

import json
import re
from pathlib import Path

import pytest

from encore.results.audit.audit import audit_path
from tests.results.result_logs import resnet_v07, write_set


@pytest.mark.parametrize(
    ("accelerator", "count", "minutes", "excess"),
    [
        ("NVIDIA V100-SXM2-32GB", 8, 5.0, None),
        ("NVIDIA V100-SXM2-32GB", 1, 5.0, 6.6),
        ("NVIDIA V100-SXM2-32GB", 8, 1.0, 4.2),
        ("NVIDIA H100-SXM5-80GB", 8, 1.0, None),
        ("NVIDIA H100-SXM5-80GB", 1, 1.0, 2.1),
        ("Google TPU v4", 1, 1.0, None),  # No data sheet
    ],
)
def test_speed_above_the_peak_rate_is_reported(
    accelerator: str, count: int, minutes: float, excess: float | None, tmp_path: Path
) -> None:
    folder = write_set(tmp_path / "logs", [resnet_v07(minutes)] * 5)
    system = {"number_of_nodes": 1, "accelerators_per_node": count, "accelerator_model_name": accelerator}
    (folder / "system.json").write_text(json.dumps(system))
    (audit,) = audit_path(folder)
    messages = [finding.found for finding in audit.findings if finding.rule == "above_peak"]
    assert len(messages) == (5 if excess else 0)
    assert all(f"{excess} times the peak of" in message for message in messages)
    assert all(re.search(rf"on {count} accelerators: [\d.]+ [TP]FLOP/s each", message) for message in messages)
