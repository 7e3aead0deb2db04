"""NeuMF next to a plain float64 model, a resumed graph, ties, and the NCF authors' weights in our evaluator."""

import copy
import dataclasses
import math
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from benchmarks.common.data import passport
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.ncf import prepare
from benchmarks.ncf.pytorch import data, evaluation, model, train
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.train import assemble, build, state_dict, train_step
from tests.in_framework.ncf_data import ITEMS, USERS, small_data

PAIRS = 500
CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
CONFIG = Config(
    device="cpu", precision="fp32", factors=4, layers=(12, 10, 6, 3), learning_rate=0.0045, beta1=0.25, beta2=0.5,
    epsilon=1e-8, batch_size=PAIRS,
)  # fmt: skip
ARCHIVE = Path(__file__).parents[4] / "shared" / "data" / "ncf_ml-1m.tar.xz"


def reference(values, users, items, labels):
    # Scores and mean loss of NeuMF as equations 7 to 12 of the paper have it, on float64 tensors.
    product = values["gmf_users"][users] * values["gmf_items"][items]
    hidden = torch.cat((values["mlp_users"][users], values["mlp_items"][items]), 1)
    for number in range(len(CONFIG.layers) - 1):
        hidden = torch.relu(hidden @ values[f"weights.{number}"].T + values[f"biases.{number}"])
    scores = torch.cat((product, hidden), 1) @ torch.cat((values["out_gmf"], values["out_mlp"])) + values["out_bias"]
    probability = torch.sigmoid(scores)
    return scores, -(labels * probability.log() + (1 - labels) * (1 - probability).log()).mean()


def relative(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize("kernel", ["plain", "fused"])
@pytest.mark.parametrize("first_layer", ["tables", "rows", "auto"])
def test_step_is_the_papers(first_layer, kernel):
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, first_layer=first_layer, optimizer_kernel=kernel)
    network = model.build(config, USERS, ITEMS)
    assert network.by_tables == (first_layer != "rows")
    for parameter in network.parameters():
        # Larger than fresh weights, so that every layer matters, and biases that are not 0.
        parameter.data.uniform_(-0.5, 0.5)
    values = {name: p.detach().double().requires_grad_() for name, p in network.named_parameters()}
    sampler = data.Sampler(small_data(), PAIRS, 4, CPU)
    sampler.draw_epoch(1)
    users, items, labels, _ = sampler.batch(0)
    scores, loss = reference(values, users, items, labels.double())
    loss.backward()
    assert relative(network(users, items).detach(), scores.detach()) < 1e-5
    (network.loss_sum(users, items, labels) / PAIRS).backward()
    for name, parameter in network.named_parameters():
        assert relative(parameter.grad, values[name].grad) < 1e-5
    network.zero_grad()
    made = assemble(config, network, sampler, CPU)
    train_step(made, 0)
    assert float(made.losses[0]) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in network.named_parameters():
        gradient = values[name].grad
        # Kingma and Ba 2015, algorithm 1, at t = 1: the corrected moments are the gradient and its square.
        expected = values[name].detach() - config.learning_rate * gradient / (gradient.abs() + config.epsilon)
        # Where a gradient is all but 0, its sign is a matter of rounding.
        clear = (gradient.abs() > 1e-6) | (gradient == 0)
        assert float(((parameter.detach().double() - expected).abs() * clear).max()) < 1e-5


@pytest.mark.parametrize(("by_tables", "read_as"), [(True, None), (True, torch.bfloat16), (False, torch.bfloat16)])
def test_bf16_gradients_are_those_of_fp32_roughly(by_tables, read_as):
    torch.manual_seed(0)
    network = model.NeuMF(USERS, ITEMS, CONFIG.factors, CONFIG.layers, by_tables)
    for parameter in network.parameters():
        parameter.data.uniform_(-0.5, 0.5)
    users, items = torch.randint(USERS, (PAIRS,)), torch.randint(ITEMS, (PAIRS,))
    labels = (torch.rand(PAIRS) < 0.2).float()
    found = []
    for precision in ("fp32", "bf16"):
        network.zero_grad()
        network.read_as = read_as if precision == "bf16" else None
        with pytorch.autocast(torch.device("cpu"), precision):
            loss = network.loss_sum(users, items, labels)
        loss.backward()
        found.append([parameter.grad.double() for parameter in network.parameters()])
    looked_up = model.rows(network.gmf_users, users, read_as)
    assert torch.equal(looked_up, network.gmf_users[users].to(read_as or torch.float32))
    # Users come many times: their gradients are summed in fp32, and reach the tables so.
    upstream = torch.randn(PAIRS, CONFIG.factors).to(looked_up.dtype)
    (summed,) = torch.autograd.grad(looked_up, network.gmf_users, upstream)
    wanted = torch.zeros(USERS, CONFIG.factors, dtype=torch.float64).index_add_(0, users, upstream.double())
    assert summed.dtype is torch.float32 and relative(summed, wanted) < 1e-6
    assert 0 < max(relative(low, exact) for exact, low in zip(*found)) < 0.05


# -- a captured epoch --------------------------------------------------------------------------------------


class HeldCapture:
    # A capture that knows the optimizer's tensors by their memory, as a CUDA graph does.
    optimizer = None

    def __init__(self, function, example, warm_up) -> None:
        warm_up(*example)
        self.memory = memory(self.optimizer)


def memory(optimizer):
    return [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_checkpoint_reaches_the_tensors_of_a_captured_graph(kernel, monkeypatch):
    eager = dataclasses.replace(CONFIG, batch_size=100, optimizer_kernel=kernel)
    graphed = dataclasses.replace(eager, device="gpu")
    sampler = data.Sampler(small_data(), 100, 4, CPU)
    whole = build(eager, USERS, ITEMS, sampler, CPU, {})
    sampler.draw_epoch(1)
    for step in range(3):
        train_step(whole, step)
    saved = copy.deepcopy(state_dict(whole))
    candidates, assembled = optimizers.adam_candidates, train.assemble

    def assemble_and_hold(*arguments):
        made = assembled(*arguments)
        HeldCapture.optimizer = made.optimizer
        return made

    monkeypatch.setattr(train, "Captured", HeldCapture)
    monkeypatch.setattr(train, "assemble", assemble_and_hold)
    # PyTorch refuses a capturable optimizer on a CPU.
    monkeypatch.setattr(optimizers, "adam_candidates", lambda *options, capturable: candidates(*options))
    fresh = build(graphed, USERS, ITEMS, sampler, CPU, {})
    resumed = build(graphed, USERS, ITEMS, sampler, CPU, saved)
    sampler.draw_epoch(2)
    for step in range(3):
        train_step(whole, step)
        train_step(resumed, step)
    # exp_avg, exp_avg_sq and step of 4 tables, 3 layers with biases and 3 tensors of the last one
    assert len(resumed.graph.memory) == 3 * 13
    assert memory(resumed.optimizer) == resumed.graph.memory
    assert all(map(torch.equal, whole.network.parameters(), resumed.network.parameters()))
    assert not any(v.any() for state in fresh.optimizer.state.values() for v in state.values())


# -- evaluation --------------------------------------------------------------------------------------------

NAN = math.nan


@pytest.mark.parametrize(
    ("negatives", "scores", "place"),
    [
        ([5, 6, 7, 8], [0.1, 0.2, 0.3, 0.4, 0.5], 0),
        ([5, 6, 7, 8], [0.9, 0.2, 0.8, 0.4, 0.5], 2),
        ([5, 6, 7, 8], [0.5, 0.2, 0.3, 0.4, 0.5], 1),
        ([5, 5, 7, 8], [0.9, 0.9, 0.3, 0.4, 0.5], 1),
        ([5, 9, 7, 8], [0.1, 0.5, 0.3, 0.4, 0.5], 0),
        ([5, 9, 7, 8], [0.5, 0.5, 0.5, 0.4, 0.5], 1),
        ([5, 6, 7, 8], [0.1, 0.2, 0.3, 0.4, NAN], 4),
        ([5, 6, 7, 8], [NAN, 0.2, 0.3, 0.4, 0.5], 1),
    ],
    ids=["none", "two", "a tie", "listed twice", "itself", "itself, ties before and after", "no number", "one is none"],
)
def test_place_of_a_held_out_item(negatives, scores, place):
    # Columns: negatives, then the held-out item 9.
    assert candidates_of(negatives).places(torch.tensor([scores]), slice(0, 1)).tolist() == [place]


def candidates_of(negatives, config=CONFIG):
    held_out = torch.tensor([9], dtype=torch.int32)
    one = small_data()._replace(users=1, test_items=held_out, negatives=np.array([negatives]))
    return evaluation.Candidates(one, config, CPU)


def test_fp16_compares_probabilities_and_the_figures_are_the_papers():
    # The logits 5 and 5.004 are two numbers of fp16, their probabilities 0.99331 and 0.99333 one; the first is listed.
    near = torch.tensor([[5.0, 0.0, 0.0, 0.0, 5.004]])
    for precision, place in (("fp32", 0), ("fp16", 1)):
        candidates = candidates_of([5, 6, 7, 8], Config(precision=precision))
        assert candidates.places(near, slice(0, 1)).tolist() == [place]
    found = evaluation.gains(torch.tensor([0, 9, 10])).tolist()
    assert found == pytest.approx([2, 1 + 1 / math.log2(9 + 2), 3])


def read_weights(path):
    # Every array by the last part of its name.
    found = {}

    def note(name, entry):
        if isinstance(entry, h5py.Dataset):
            found[name.rsplit("/", 1)[-1]] = torch.from_numpy(np.array(entry))

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def of_authors(weights, layers):
    # A NeuMF of which one half says nothing.
    users, items = weights["user_embedding_W"], weights["item_embedding_W"]
    network = model.NeuMF(len(users), len(items), 1 if layers else users.shape[1], layers or (2, 1), by_tables=False)
    kind, silent = (("mlp", network.out_gmf), ("gmf", network.out_mlp))[not layers]
    getattr(network, f"{kind}_users").data, getattr(network, f"{kind}_items").data = users, items
    for number in range(max(0, len(layers) - 1)):
        # Keras has (before, after).
        network.weights[number].data = weights[f"layer{number + 1}_W"].t().contiguous()
        network.biases[number].data = weights[f"layer{number + 1}_b"]
    getattr(network, f"out_{kind}").data = weights["prediction_W"].reshape(-1)
    silent.data.zero_()
    network.out_bias.data = weights["prediction_b"]
    return network


@pytest.mark.skipif(not ARCHIVE.exists(), reason="the NCF authors' weights are not at hand")
@torch.no_grad()
def test_evaluator_gives_the_authors_figures(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    source, folder = tmp_path / "ncf_ml-1m", tmp_path / "set"
    assert prepare.main([str(source), "-o", str(folder)]) == 0
    data_set = data.load(folder, data.synthetic(passport.read(folder), torch.device("cpu")))
    config = Config(device="cpu", precision="fp32", eval_batch_size=65536)
    candidates = evaluation.Candidates(data_set, config, CPU)
    parts = list(map(candidates.part, range(candidates.parts)))
    gmf, mlp = sorted((source / "reference_weights").glob("*.h5"))
    for path, layers, figures in ((gmf, (), (0.636755, 0.369085)), (mlp, (64, 32, 16, 8), (0.671026, 0.396254))):
        network = of_authors(read_weights(path), layers)
        tables = network.first_layer_tables()
        scored = (network.score_candidates(0, part, candidates.items[part], tables) for part in parts)
        sums = sum(evaluation.gains(candidates.places(scores, part)) for scores, part in zip(scored, parts))
        assert [round(each, 6) for each in (sums[:2] / sums[2]).tolist()] == list(figures)
