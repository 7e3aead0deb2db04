"""When a run evaluates: as the submissions' logs show it. Runs in the framework's environment."""

from __future__ import annotations

import json
from collections.abc import Callable


def test_evaluations_and_blocks_are_where_the_submissions_had_them(in_mxnet: Callable[..., str]) -> None:
    told = json.loads(in_mxnet("events.py").splitlines()[-1])
    # NVIDIA's v0.7 DGX-1 log: evaluations after epochs 1, 5, 9, ... 37; blocks of 1, then 4 epochs.
    assert told["v0.7 dgx1"]["evaluated"] == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37]
    assert told["v0.7 dgx1"]["blocks"] == [[1, 1], *([first, 4] for first in range(2, 37, 4))]
    # v0.5 DGX-1: offset 2, so epoch 63 counted from 1; the last epoch is always evaluated.
    assert 63 in told["v0.5 dgx1"]["evaluated"]
    assert told["v0.5 dgx1"]["evaluated"][:2] == [3, 7]
    assert told["v0.5 dgx1"]["evaluated"][-1] == 100
