"""What two ranks measure of the links between them."""

import json

import pytest
import torch.distributed as dist

from benchmarks.common.checks import link_speeds
from benchmarks.common.frameworks import pytorch

RANKS = (2,)


def test_ranks_measure_what_they_exchange(tmp_path, monkeypatch):
    left, finish = [], pytorch.finish
    monkeypatch.setattr(pytorch, "finish", lambda: (left.append(dist.get_rank()), finish()))
    output = tmp_path / "links.json"
    assert link_speeds.main(["--device", "cpu", "--most-bytes", "20000", "--output", str(output)]) == 0
    if left == [0]:
        measured = json.loads(output.read_text(encoding="utf-8"))
        assert (measured["ranks"], measured["backend"]) == (2, "gloo")
        assert [[value is None for value in row] for row in measured["pairs"]] == [[True, False], [False, True]]
        for row, share in zip(measured["collectives"], (1.0, 0.5)):
            assert row["rate"] == pytest.approx(share * row["bytes"] / row["seconds"])
