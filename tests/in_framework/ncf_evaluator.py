"""HR@10 and NDCG@10 of the NCF authors' weights in our evaluator.

Arguments: the prepared data set, the HDF5 file of the GMF model, that of the MLP model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import torch

from benchmarks.common.data import passport
from benchmarks.common.run.ranks import Ranks
from benchmarks.ncf.pytorch import data, evaluation
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.model import NeuMF


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Every array by the last part of its name."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, entry: object) -> None:
        if isinstance(entry, h5py.Dataset):
            found[name.rsplit("/", 1)[-1]] = torch.from_numpy(np.array(entry))

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def gmf(weights: dict[str, torch.Tensor]) -> NeuMF:
    """A NeuMF whose MLP says nothing."""
    users, items = weights["user_embedding_W"], weights["item_embedding_W"]
    network = NeuMF(len(users), len(items), users.shape[1], (2, 1), by_tables=False)
    network.gmf_users.data, network.gmf_items.data = users, items
    network.out_gmf.data = weights["prediction_W"].reshape(-1)
    network.out_mlp.data.zero_()
    network.out_bias.data = weights["prediction_b"]
    return network


def mlp(weights: dict[str, torch.Tensor]) -> NeuMF:
    """A NeuMF whose factorisation says nothing."""
    users, items = weights["user_embedding_W"], weights["item_embedding_W"]
    network = NeuMF(len(users), len(items), 1, (64, 32, 16, 8), by_tables=False)
    network.mlp_users.data, network.mlp_items.data = users, items
    for number in range(3):
        # Keras has (before, after).
        network.weights[number].data = weights[f"layer{number + 1}_W"].t().contiguous()
        network.biases[number].data = weights[f"layer{number + 1}_b"]
    network.out_mlp.data = weights["prediction_W"].reshape(-1)
    network.out_gmf.data.zero_()
    network.out_bias.data = weights["prediction_b"]
    return network


@torch.no_grad()
def evaluate(network: NeuMF, data_set: data.DataSet) -> dict[str, float]:
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    config = Config(device="cpu", precision="fp32", eval_batch_size=65536)
    candidates = evaluation.Candidates(data_set, ranks)
    tables = network.first_layer_tables()
    sums = sum(
        evaluation.score_part(network, candidates, config, number, tables)
        for number in range(evaluation.part_count(candidates, config, data_set.users))
    )
    return dict(zip(("HR@10", "NDCG@10"), (sums[:2] / sums[2]).tolist(), strict=True))


def main() -> None:
    folder = Path(sys.argv[1])
    data_set = data.load(folder, data.synthetic(passport.read(folder), torch.device("cpu")))
    models = {"GMF": gmf(read_weights(sys.argv[2])), "MLP": mlp(read_weights(sys.argv[3]))}
    print(json.dumps({name: evaluate(network, data_set) for name, network in models.items()}))


if __name__ == "__main__":
    main()
