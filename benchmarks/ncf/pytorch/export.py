"""NCF for inference servers: the score of user-item pairs.

$ python -m benchmarks.ncf.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np
import torch

from benchmarks.common.data import manifest
from benchmarks.common.export import export
from benchmarks.common.export.export import Infer, Subject, Value
from benchmarks.common.export.torch import TOOLS
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch import data, model
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.evaluation import Candidates, gains


def evaluate(candidates: Candidates, infer: Infer) -> Dict[str, float]:
    sums = torch.zeros(3, dtype=torch.float64)
    for part in map(candidates.part, range(candidates.parts)):
        items = candidates.items[part].numpy().astype(np.int64)
        (scores,) = infer(np.repeat(np.arange(part.start, part.stop), items.shape[1]), items.ravel())
        sums += gains(candidates.ranks_of_held_out(torch.from_numpy(scores).reshape(items.shape), part))
    return {"hit_rate": float(sums[0] / sums[2])}


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    data_set = data.load(folder, data.synthetic(manifest.read(folder), ranks.context))
    network = model.build(config, data_set.users, data_set.items)
    network.load_state_dict(saved["network"])
    # A server has few pairs at a time: it looks the rows up.
    network.by_tables = False
    return Subject(
        model=network.eval(),
        inputs=(
            Value("users", f"user id, below {data_set.users}"),
            Value("items", f"item id, below {data_set.items}"),
        ),
        outputs=(Value("scores", "logit: a user's items in descending order are the recommendations"),),
        example=(np.arange(4), np.arange(4)),
        evaluate=partial(evaluate, Candidates(data_set, config, ranks)),
        preprocessing={"users": data_set.users, "items": data_set.items, "numbers": "of the prepared data set"},
    )


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
