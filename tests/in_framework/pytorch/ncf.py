"""NeuMF against recorded values of its equations, a resumed graph, ties in the evaluation, and the sampler."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.ncf.pytorch import config, data, evaluation, model, operators, train
from tests.in_framework.torch_checks import CPU
from tests.in_framework.waves import digest, waves

USERS, ITEMS, HELD_OUT, PAIRS = 40, 30, 29, 500
CONFIG = config.Config(
    device="cpu", precision="fp32", factors=4, layers=(12, 10, 6, 3), learning_rate=0.0045, beta1=0.25, beta2=0.5,
    epsilon=1e-3, batch_size=PAIRS,
)  # fmt: skip
BATCH = (torch.arange(PAIRS) % USERS, torch.arange(PAIRS) * 7 % ITEMS, (torch.arange(PAIRS) % 5 == 0).float())


def small_data():
    # Every user has item 0, and the last item is only held out
    interactions = torch.from_numpy(waves(USERS, ITEMS) < -0.6)
    interactions[:, 0], interactions[:, HELD_OUT] = True, False
    test_items, facts = torch.full((USERS,), HELD_OUT, dtype=torch.int32), {"users": USERS, "items": ITEMS}
    return data.DataSet(USERS, ITEMS, *interactions.nonzero().int().unbind(1), test_items, np.zeros((USERS, 1)), facts)


@torch.no_grad()
def fill(network):
    # Weights larger than fresh ones, so that every layer matters, and biases that are not 0
    for phase, parameter in enumerate(network.parameters()):
        parameter.copy_(torch.from_numpy(0.5 * waves(*parameter.shape, phase=phase)))
    return network


def gradients_of(network, precision="fp32"):
    network.zero_grad()
    with pytorch.autocast(CPU.context, precision):
        loss = network.loss_sum(*BATCH) / PAIRS
    return float(loss.detach()), torch.autograd.grad(loss, list(network.parameters()))


@pytest.mark.parametrize("first_layer", ["tables", "rows", "auto"])
def test_loss_and_gradients_of_neumf(first_layer):
    # Recorded from equations 7 to 12 of the paper in float64; gradients in the order of the parameters
    network = fill(model.build(dataclasses.replace(CONFIG, first_layer=first_layer), USERS, ITEMS))
    assert network.by_tables == (first_layer != "rows")
    loss, gradients = gradients_of(network)
    scores = digest(network(*BATCH[:2]).detach())
    assert [loss, *scores] == pytest.approx([0.7414034, 0.1345885, 0.0007271033], rel=1e-5, abs=1e-7)
    assert [digest(gradient)[1] for gradient in gradients] == pytest.approx(
        [
            *(0.0001065135, 1.284013e-05, 3.760304e-05, -9.424125e-07, -0.0003691278, -0.03986223, 0.2806295),
            *(8.201939e-06, 0.0006157606, 0.002694214, -0.002178303, 0.002971726, -0.03550899),
        ],
        rel=1e-4,
        abs=2e-9,
    )


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_steps_are_those_of_adam(kernel):
    # Losses and weights of torch.optim.Adam in float64
    sampler, network = data.Sampler(small_data(), PAIRS, 4, CPU), fill(model.build(CONFIG, USERS, ITEMS))
    training = train.assemble(dataclasses.replace(CONFIG, optimizer_kernel=kernel), network, sampler, CPU)
    train_epoch(1, training, steps=2)
    assert training.losses[:2].tolist() == pytest.approx([0.7365851742, 0.7374244027], rel=1e-5)
    weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert digest(weights) == pytest.approx([0.0173596026, 0.0243937887], rel=1e-6)


@pytest.mark.parametrize(("by_tables", "read_as"), [(True, None), (True, torch.bfloat16), (False, torch.bfloat16)])
def test_bf16_gradients_are_near_those_of_fp32(by_tables, read_as):
    network = fill(model.NeuMF(USERS, ITEMS, CONFIG.factors, CONFIG.layers, by_tables))
    exact, network.read_as = gradients_of(network)[1], read_as
    errors = [float((bf16 - fp32).abs().max() / fp32.abs().max())
              for bf16, fp32 in zip(gradients_of(network, "bf16")[1], exact, strict=True)]  # fmt: skip
    assert 0 < max(errors) < 0.1
    table, users = network.gmf_users, BATCH[0]
    rows = model.rows(table, users, read_as)
    # Users come many times: their gradients are summed in fp32, and reach the tables so.
    upstream = torch.from_numpy(waves(*rows.shape)).to(rows.dtype)
    expected = torch.zeros(table.shape, dtype=torch.float64).index_add_(0, users, upstream.double())
    torch.testing.assert_close(*torch.autograd.grad(rows, table, upstream), expected.float(), rtol=1e-5, atol=1e-6)


# -- a captured epoch --------------------------------------------------------------------------------------


def train_epoch(seed, *trainings, steps=3):
    trainings[0].sampler.draw_epoch(seed)
    for step in range(steps):
        for training in trainings:
            train.train_step(training, step)


def addresses(optimizer):
    return [value.data_ptr() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_checkpoint_reaches_the_tensors_of_a_captured_graph(kernel, monkeypatch):
    eager = dataclasses.replace(CONFIG, batch_size=100, optimizer_kernel=kernel)
    sampler = data.Sampler(small_data(), 100, 4, CPU)
    first = train.build(eager, USERS, ITEMS, sampler, CPU, {})
    train_epoch(1, first)
    checkpoint, built = copy.deepcopy(train.state_dict(first)), []
    assemble, candidates = train.assemble, optimizers.adam_candidates
    monkeypatch.setattr(train, "assemble", lambda *given: built.append(assemble(*given)) or built[-1])
    # A capture knows the optimizer's tensors by their memory, as a CUDA graph does.
    monkeypatch.setattr(
        train,
        "Captured",
        lambda function, example, warm_up: warm_up(*example) or addresses(built[-1].optimizer),
    )
    # PyTorch refuses a capturable optimizer on a CPU.
    monkeypatch.setattr(optimizers, "adam_candidates", lambda *options, capturable: candidates(*options))
    graphed = dataclasses.replace(eager, device="gpu")
    fresh, resumed = (train.build(graphed, USERS, ITEMS, sampler, CPU, state) for state in ({}, checkpoint))
    train_epoch(2, first, resumed)
    # exp_avg, exp_avg_sq and step of 4 tables, 3 layers with biases and 3 tensors of the last one
    assert len(resumed.graph) == 3 * 13 and addresses(resumed.optimizer) == resumed.graph
    assert all(map(torch.equal, first.network.parameters(), resumed.network.parameters()))
    assert not any(value.any() for state in fresh.optimizer.state.values() for value in state.values())


# -- evaluation --------------------------------------------------------------------------------------------

NAN = math.nan


@pytest.mark.parametrize(
    ("negatives", "scores", "precision", "position"),
    [
        ([5, 6, 7, 8], [0.1, 0.2, 0.3, 0.4, 0.5], "fp32", 0),
        ([5, 6, 7, 8], [0.9, 0.2, 0.8, 0.4, 0.5], "fp32", 2),
        ([5, 6, 7, 8], [0.5, 0.2, 0.3, 0.4, 0.5], "fp32", 1),
        ([5, 5, 7, 8], [0.9, 0.9, 0.3, 0.4, 0.5], "fp32", 1),
        ([5, 9, 7, 8], [0.1, 0.5, 0.3, 0.4, 0.5], "fp32", 0),
        ([5, 9, 7, 8], [0.5, 0.5, 0.5, 0.4, 0.5], "fp32", 1),
        ([5, 6, 7, 8], [0.1, 0.2, 0.3, 0.4, NAN], "fp32", 4),
        ([5, 6, 7, 8], [NAN, 0.2, 0.3, 0.4, 0.5], "fp32", 1),
        # These logits differ in fp16, their probabilities 0.99331 and 0.99333 do not; the first is listed.
        ([5, 6, 7, 8], [5.0, 0.0, 0.0, 0.0, 5.004], "fp32", 0),
        ([5, 6, 7, 8], [5.0, 0.0, 0.0, 0.0, 5.004], "fp16", 1),
    ],
)
def test_position_of_a_held_out_item(negatives, scores, precision, position):
    # Columns: negatives, then the held-out item 9
    test_items = torch.tensor([9], dtype=torch.int32)
    one_user = small_data()._replace(users=1, test_items=test_items, negatives=np.array([negatives]))
    candidates = evaluation.Candidates(one_user, config.Config(precision=precision), CPU)
    assert candidates.ranks_of_held_out(torch.tensor([scores]), slice(0, 1)).tolist() == [position]


def test_hit_ratio_and_ndcg_of_the_first_ten_positions():
    # Sums over the users: hits, gains 1 / log2(position + 2), and users
    assert evaluation.gains(torch.tensor([0, 9, 10])).tolist() == pytest.approx([2, 1 + 1 / math.log2(9 + 2), 3])


@torch.no_grad()
def test_candidates_have_the_scores_of_their_pairs():
    network = fill(model.build(CONFIG, USERS, ITEMS))
    items = torch.tensor([[3, 1, 4], [1, 5, 9]])
    scores = network.score_candidates(5, slice(2, 4), items, network.first_layer_tables())
    torch.testing.assert_close(scores.flatten(), network(torch.tensor([7, 7, 7, 8, 8, 8]), items.flatten()))


# -- sampler -----------------------------------------------------------------------------------------------


def samples_of_epoch(sampler, seed):
    # int64 (samples, 3): user, item and label in the order of the steps
    sampler.draw_epoch(seed)
    batches = [sampler.batch(step) for step in range(sampler.steps_per_epoch)]
    return torch.cat([torch.stack((batch.users, batch.items, batch.labels.long()), 1) for batch in batches])


def test_an_epoch_has_each_positive_once_and_even_negatives():
    data_set = small_data()
    positives, trained = torch.stack((data_set.train_users, data_set.train_items), 1), torch.zeros(USERS, ITEMS)
    trained[positives.long().unbind(1)] = 1
    sampler, counts, orders = data.Sampler(data_set, 60, 4, CPU), torch.zeros(USERS, ITEMS), set()
    for epoch in range(200):
        samples = samples_of_epoch(sampler, data.epoch_seed(7, epoch))
        labels = samples[:, 2]
        assert sorted(samples[labels == 1, :2].tolist()) == positives.tolist() and len(samples) == 5 * len(positives)
        orders.add(tuple(labels[:60].tolist()))
        counts.index_put_(tuple(samples[labels == 0, :2].t()), torch.ones(()), accumulate=True)
    assert len(orders) == 200 and not counts[trained == 1].any()
    expected = counts.sum(1, keepdim=True) / (1 - trained).sum(1, keepdim=True)
    # Each term of a chi-squared sum is about 1 - 1/k on the mean.
    assert float(((counts - expected) ** 2 / expected)[trained == 0].mean()) == pytest.approx(1.0, abs=0.15)


def test_three_ranks_draw_the_samples_of_one_rank():
    single = data.Sampler(small_data(), 60, 4, CPU)
    parts = [data.Sampler(small_data(), 20, 4, Ranks(rank, 3, rank, 3, CPU.context)) for rank in range(3)]
    for sampler in (single, *parts):
        sampler.draw_epoch(1)
    assert {part.steps_per_epoch for part in parts} == {single.steps_per_epoch}
    for step in range(single.steps_per_epoch):
        users, items, labels, sizes = zip(*(part.batch(step) for part in parts), strict=True)
        expected = single.batch(step)
        assert all(map(torch.equal, map(torch.cat, (users, items, labels)), expected)), step
        assert set(sizes) == {len(expected.users)}


def shuffle_keys(seed):
    return torch.randint(1 << 32, (operators.ROUNDS + 1,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 1024, 12345])
def test_every_order_has_each_sample_once(count):
    orders = [operators.shuffle(torch.arange(count), count, shuffle_keys(seed)) for seed in range(3)]
    assert all(torch.equal(order.sort().values, torch.arange(count)) for order in orders)
    # The sample at a position depends on no other position.
    last = torch.arange(count // 3, count)
    assert torch.equal(operators.shuffle(last, count, shuffle_keys(0)), orders[0][last])


def test_order_by_fixed_keys():
    # Recorded; by chi-squared tests, positions and distances of neighbours in such orders are as even as in random ones
    order = operators.shuffle(torch.arange(17), 17, torch.arange(operators.ROUNDS + 1) * 12345)
    assert order.tolist() == [1, 6, 3, 4, 16, 11, 9, 15, 5, 10, 14, 8, 2, 7, 0, 13, 12]


def test_the_data_set_is_loaded_into_the_tensors_of_generated_pairs(tmp_path):
    # Before the clock starts, the sampler works on generated pairs; then on the same tensors with the data set's.
    data_set = small_data()
    content = {"facts": data_set.counts, "splits": {"train": {"count": len(data_set.train_users)}}}
    generated = data.synthetic(content, CPU.context)
    sampler = data.Sampler(generated, 60, 4, CPU)
    sampler.draw_epoch(5)
    tensors = [value for value in vars(sampler).values() if torch.is_tensor(value)]
    for name in ("train_users", "train_items", "test_items", "negatives"):
        np.save(tmp_path / f"{name.replace('neg', 'test_neg')}.npy", np.asarray(getattr(data_set, name)))
    loaded = data.load(tmp_path, generated)
    sampler.index()
    assert all(ours is theirs for ours, theirs in zip(loaded[2:5], generated[2:5]))
    # A captured graph reads these tensors
    assert sum(any(value is now for now in vars(sampler).values()) for value in tensors) >= 3
    assert torch.equal(samples_of_epoch(sampler, 1), samples_of_epoch(data.Sampler(data_set, 60, 4, CPU), 1))
