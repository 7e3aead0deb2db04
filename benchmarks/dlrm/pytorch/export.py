"""DLRM for inference servers: the logit of a click from numbers and table rows.

$ python -m benchmarks.dlrm.pytorch.export --experiment RUN/experiment_0 --data DATA -o DIR
"""

from contextlib import closing
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.common.export import export
from benchmarks.common.export.export import Arrays, Infer, Subject, Value
from benchmarks.common.export.torch import TOOLS, as_tensors
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.pytorch.auc import area_under_curve
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch, DataSet, EvaluationInput, free_memory, open_data
from benchmarks.dlrm.pytorch.model import Network, Training


class Served(nn.Module):
    """Network and all tables, joined, in one module."""

    def __init__(self, network: Network, weight: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("weight", weight)
        self.register_buffer("offsets", offsets)

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(rows,) of numbers (rows, 13) and indices (rows, 26), int64."""
        vectors = self.weight.index_select(0, (indices + self.offsets).reshape(-1)).reshape(-1)
        return self.network.score(self.network.bottom(numbers), vectors)


def all_tables(saved: Mapping[str, Any], sizes: Sequence[int]) -> torch.Tensor:
    tables_by_number: Dict[int, torch.Tensor] = {}
    for rank, tables in enumerate(saved["placement"]):
        parts = saved[f"rank_{rank}"]["tables"].split([sizes[table] for table in tables])
        tables_by_number.update(zip(tables, parts))
    return torch.cat([tables_by_number[table] for table in range(len(sizes))])


def evaluate(evaluation: EvaluationInput, infer: Infer) -> Dict[str, float]:
    scores, labels = [], []
    with closing(evaluation.one_pass()) as batches:
        for batch, valid in batches:
            indices = batch.indices.t()[:valid].numpy().astype(np.int64)
            (logits,) = infer(np.ascontiguousarray(batch.numbers[:valid].numpy()), indices)
            scores.append(torch.from_numpy(logits))
            labels.append(batch.labels[:valid].clone())
    return {"auc": area_under_curve(torch.cat(scores), torch.cat(labels))}


def make_subject(config: Config, data: DataSet, training: Training, ranks: Ranks) -> Subject:
    """Return the export of ``training``, which has the weights."""

    def original(*inputs: np.ndarray) -> Arrays:
        numbers, indices = as_tensors(inputs)
        batch = Batch(numbers, torch.zeros(len(numbers)), indices.t().contiguous().int())
        return (training.scores(batch).numpy(),)

    tables = training.tables
    rows = ", ".join(map(str, data.table_sizes))
    return Subject(
        model=Served(training.network, tables.weight, tables.offsets.reshape(-1)).eval(),
        inputs=(
            Value("numbers", "log(1 + max(0, x)) of the 13 integer features"),
            Value("indices", f"row of each of the 26 tables; these have {rows} rows"),
        ),
        outputs=(Value("logits", "logit of a click; its sigmoid is the probability"),),
        example=(np.zeros((2, NUMBERS), np.float32), np.zeros((2, len(data.table_sizes)), np.int64)),
        evaluate=lambda infer: evaluate(EvaluationInput(config, data, tables.mine, ranks), infer),
        preprocessing={"numbers": "log(1 + max(0, x))", "table_sizes": list(data.table_sizes)},
        original=original,
    )


def prepare(config: Config, saved: Mapping[str, Any], folder: Path) -> Subject:
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    data = open_data(folder, config, 1, free_memory(ranks))
    # No kernel of the run's GPU: the plain operators.
    training = Training(config, data.table_sizes, ranks, None, data.placement)
    training.weights.copy_(saved["weights"])
    training.tables.weight.copy_(all_tables(saved, data.table_sizes))
    return make_subject(config, data, training, ranks)


if __name__ == "__main__":
    export.main(__doc__, Config, TOOLS, prepare)
