"""Speed of the links between two ranks."""

import json
import os

import pytest

from benchmarks.common.checks import link_speeds

RANKS = (2,)


def test_pairs_and_collectives_are_measured(tmp_path):
    output = tmp_path / "links.json"
    assert link_speeds.main(["--device", "cpu", "--most-bytes", "20000", "--output", str(output)]) == 0
    if os.environ["RANK"] == "0":
        measured = json.loads(output.read_text(encoding="utf-8"))
        assert (measured["ranks"], measured["backend"]) == (2, "gloo")
        assert [[value is None for value in row] for row in measured["pairs"]] == [[True, False], [False, True]]
        # Bytes on the wire: all in an all-reduce, half in an all-to-all.
        for row, factor in zip(measured["collectives"], (1.0, 0.5)):
            assert row["rate"] == pytest.approx(factor * row["bytes"] / row["seconds"])
