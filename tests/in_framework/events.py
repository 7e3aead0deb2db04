"""Print the epochs (from 1) after which configurations evaluate, and their blocks, as JSON."""

import json
from types import SimpleNamespace

from benchmarks.resnet import events

CASES = {"v0.7 dgx1": (37, 4, 0), "v0.5 dgx1": (100, 4, 2)}

told = {}
for name, (epochs, period, offset) in CASES.items():
    config = SimpleNamespace(epochs=epochs, eval_period=period, eval_offset=offset, checkpoint_interval=0)
    timeline = events.timeline(config, 10)
    evaluated = [step // 10 for step in range(1, timeline.steps + 1) if timeline.evaluates_after(step)]
    starts = [0, *evaluated[:-1]]
    told[name] = {
        "evaluated": evaluated,
        "blocks": [[epoch + 1, timeline.block_epochs(epoch)] for epoch in starts],
    }
print(json.dumps(told))
