"""Print the epochs (from 1) after which configurations evaluate, and their blocks, as JSON."""

import json
from types import SimpleNamespace

from benchmarks.resnet import events

CASES = {"v0.7 dgx1": (37, 4, 0), "v0.5 dgx1": (100, 4, 2)}

told = {}
for name, (epochs, period, offset) in CASES.items():
    config = SimpleNamespace(epochs=epochs, eval_period=period, eval_offset=offset)
    every = range(epochs)
    told[name] = {
        "evaluated": [e + 1 for e in every if events.evaluates_after(e, config)],
        "blocks": [[e + 1, events.block_length(e, config)] for e in every if events.starts_block(e, config)],
    }
print(json.dumps(told))
