"""Code of both translations: the chunked loss against PyTorch's cross-entropy, the choice of apex, beam search."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.translation.pytorch import beam, loss, operators
from benchmarks.translation.pytorch.batches import SourceBatch
from benchmarks.translation.pytorch.beam import Rules
from tests.in_framework.waves import waves

ROWS, VOCABULARY, WIDTH, CHUNK = 50, 301, 24, 7
CPU = torch.device("cpu")


class LargestTensor(TorchDispatchMode):
    # Number of elements of the largest result of any operator
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self.elements = max([self.elements, *(output.numel() for output in results if torch.is_tensor(output))])
        return result


def example():
    # Hidden states, weights, bias, and targets; every fifth target is padding
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    tensors = [torch.from_numpy(waves(*shape, phase=phase)).float() for phase, shape in enumerate(shapes)]
    targets = 1 + torch.arange(ROWS) ** 2 % (VOCABULARY - 1)
    targets[::5] = loss.PAD
    return [tensor.requires_grad_() for tensor in tensors], targets


def results(is_chunked, smoothing, has_bias, dtype=None):
    # The sum, and the gradients of half of it
    inputs, targets = example()
    hidden, weight, bias = inputs = inputs if has_bias else [*inputs[:2], None]
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        if is_chunked:
            total = loss.smoothed_loss(hidden, weight, bias, targets, smoothing, CHUNK)
        else:
            total = loss.plain_loss(torch.nn.functional.linear(hidden, weight, bias), targets, smoothing)
    return [total.detach(), *torch.autograd.grad(total / 2, [tensor for tensor in inputs if tensor is not None])]


def error(ours, theirs):
    # Largest error as a fraction of the largest value of each tensor
    assert [(tensor.dtype, tensor.shape) for tensor in ours] == [(tensor.dtype, tensor.shape) for tensor in theirs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_loss_and_gradients_in_every_type(smoothing, has_bias):
    (hidden, weight, bias), targets = example()
    logits = torch.nn.functional.linear(hidden, weight, bias if has_bias else None)
    exact = results(False, smoothing, has_bias)
    options = {"ignore_index": loss.PAD, "reduction": "sum", "label_smoothing": smoothing}
    torch.testing.assert_close(exact[0], torch.nn.functional.cross_entropy(logits, targets, **options).detach())
    assert error(results(True, smoothing, has_bias), exact) < 5e-6
    for dtype, tolerance in ((torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        plain, chunked = (error(results(is_chunked, smoothing, has_bias, dtype), exact) for is_chunked in (False, True))
        assert 0 < chunked < min(tolerance, 1.5 * plain)


def test_padding_counts_nothing_and_is_never_computed():
    (hidden, weight, bias), targets = example()
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    of_rows, total = (loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=some) for some in (rows, None))
    assert of_rows == total and loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1) == 0
    assert torch.autograd.grad(total, [hidden])[0][::5].abs().max() == 0
    frozen = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1), [weight])
    assert error(frozen, torch.autograd.grad(of_rows, [weight])) < 5e-6
    # The gradient of the weights is the largest tensor with any vocabulary, then one chunk of logits.
    for has_gradients in (True, False):
        with LargestTensor() as largest, torch.set_grad_enabled(has_gradients):
            loss.smoothed_loss(hidden, weight, bias, targets, 0.1, CHUNK)
        assert largest.elements == max(VOCABULARY * WIDTH, CHUNK * VOCABULARY) < ROWS * VOCABULARY / 2


def fused_loss(logits, labels, smoothing, padding, to_float):
    # apex.contrib.xentropy.SoftmaxCrossEntropyLoss by PyTorch's operators
    assert to_float == (logits.dtype != torch.float32)
    losses = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
    return losses.masked_fill(labels == padding, 0)


def fused_norm(*, input, weight, bias, normalized_shape, eps):
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


RIGHT = {
    "loss": SimpleNamespace(SoftmaxCrossEntropyLoss=SimpleNamespace(apply=fused_loss)),
    "norm": SimpleNamespace(fused_layer_norm_affine=fused_norm),
}
SIZES = {"loss": {"rows": 4, "vocabulary": 50}, "norm": {"rows": 4, "width": 16}}
choose = partial(operators.choose, sizes=SIZES, ranks=Ranks(0, 1, 0, 1, CPU), dtype=torch.float32)


def test_apex_is_taken_where_it_is_right_and_faster(monkeypatch, capsys):
    for name, function in operators.apex_operators(RIGHT).items():
        for dtype in kernels.TOLERANCES:
            distance = kernels.distance_of(operators.OPERATORS[name], function, CPU, dtype)
            assert distance < kernels.tolerance(CPU, dtype)
    assert choose("apex", saved={}, apex_modules=RIGHT)[0] == {"loss": "apex", "norm": "apex"}
    saved = {"loss": "apex", "norm": "plain"}
    assert choose("auto", saved=saved, apex_modules=RIGHT)[0] == saved
    assert choose("auto", saved={})[0] == {"loss": "plain", "norm": "plain"}
    times = itertools.count(1)
    # apex is measured first, so that it is the faster.
    monkeypatch.setattr(kernels, "seconds", lambda call: (call(), next(times))[1])
    wrong = {**RIGHT, "norm": SimpleNamespace(fused_layer_norm_affine=lambda **names: 1.001 * fused_norm(**names))}
    assert choose("auto", saved={}, apex_modules=wrong)[0] == saved
    printed = capsys.readouterr().err
    assert "loss apex (apex" in printed and "norm plain (apex ArithmeticError: wrong by" in printed
    for wanted, had, hint in (("apex", {}, "use kernels=auto"), ("auto", {"loss": "apex"}, "resume in its image")):
        with pytest.raises(ValueError, match=hint):
            choose(wanted, apex_modules={}, saved=had)


# -- beam search, with translations recorded from the algorithms of the submissions ---------------------------

TOKENS, SOURCE, LONGEST, SEEDS = 6, 3, 4, range(12)
GNMT = Rules(beam.length_penalty(0.6, 6), beam.coverage_penalty(0.1), ended_stay=True)
TRANSFORMER = Rules(beam.length_penalty(0.6, 5), shortest=1)


def model(seed, prefix, levels):
    # Scores, whose sums are exact in fp32, and attention after a prefix, from a linear congruential generator; few
    # levels give equal scores
    number, numbers = seed * 7919 + 1, []
    for token in (*prefix, *[0] * (TOKENS + SOURCE)):
        number = (number * 1103515245 + 12345 + 7 * token) % 2**31
        numbers.append(number // 2**16)
    scores, attention = torch.tensor(numbers[len(prefix) :]).split((TOKENS, SOURCE))
    return scores % levels * (-8.0 / levels), (attention % 1024 / 256).softmax(0)


class State:
    # Each row's prefix and the seed of its sentence, and the number of rows that went through the model

    def __init__(self, seeds, levels):
        self.seeds, self.levels, self.prefixes, self.rows = seeds, levels, [()] * len(seeds), 0

    def select(self, rows):
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]

    def step(self, tokens, position, state):
        self.rows += len(tokens)
        self.prefixes = [(*prefix, token) for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        assert {len(prefix) for prefix in self.prefixes} == {position + 1}
        results = map(partial(model, levels=self.levels), self.seeds, self.prefixes)
        return tuple(map(torch.stack, zip(*results)))


def search(seeds, width, rules, longest=LONGEST, levels=1024):
    # Translations, and the number of rows that went through the model
    state = State([seed for seed in seeds for _ in range(width)], levels)
    batch = SourceBatch(np.arange(len(seeds)), torch.zeros(len(seeds), 1), torch.ones(len(seeds)))
    return beam.search(state.step, state, batch, beam=width, longest=longest, rules=rules), state.rows


# Tokens of each sentence, recorded from sequence_generator.py of GNMT's and fairseq's SequenceGenerator of the
# Transformer's submission, written in plain Python for one sentence
@pytest.mark.parametrize(
    ("rules", "width", "levels", "translations"),
    [
        (GNMT, 1, 1024, "15 41 5415 1451 4145 5 1445 5141 5411 1 545 4"),
        (GNMT, 1, 4, "41  4 511  1151 11 1 5141 141 11 "),
        (GNMT, 2, 1024, "15 1 54 1451  5 1445 5141 1141 1 545 "),
        (GNMT, 2, 4, "4141  4 5  1151  1 5141  11 "),
        (GNMT, 4, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT, 4, 4, "4141  51 5  1151  1 5141  11 "),
        (GNMT, 5, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT, 5, 4, "4141  51 5  1151  1 5141  11 "),
        (TRANSFORMER, 1, 1024, "15 41 541 145 414 5 144 514 541 1 545 4"),
        (TRANSFORMER, 1, 4, "41 1 4 511 4 115 11 1 514 141 11 514"),
        (TRANSFORMER, 2, 1024, "15 1 54 141 4 5 1 514 114 1 545 4"),
        (TRANSFORMER, 2, 4, "41 1 51 5 4 1 115 1 515 14 11 514"),
        (TRANSFORMER, 4, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER, 4, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
        (TRANSFORMER, 5, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER, 5, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
    ],
)
def test_search_is_the_submitted_algorithm(rules, width, levels, translations):
    tokens, _ = search(SEEDS, width, rules, levels=levels)
    assert " ".join("".join(map(str, sentence)) for sentence in tokens) == translations


@pytest.mark.parametrize("rules", [GNMT, TRANSFORMER])
def test_sentences_of_a_batch_are_translated_independently(rules):
    translations, rows = search(SEEDS, 2, rules)
    singles = [search([seed], 2, rules) for seed in SEEDS]
    assert translations == [sentences[0] for sentences, _ in singles]
    # A sentence that has ended leaves the batch, and they end at different lengths.
    assert rows == sum(count for _, count in singles) < len(SEEDS) * 2 * LONGEST
    assert len({len(tokens) for tokens in translations}) >= 2
    limits = [1 + max(1, seed % LONGEST) for seed in SEEDS]
    limited = [search([seed], 2, rules, limit)[0][0] for seed, limit in zip(SEEDS, limits, strict=True)]
    assert search(SEEDS, 2, rules, limits)[0] == limited
    assert search([], 4, rules) == ([], 0)


def test_equal_scores_are_in_the_order_of_their_positions():
    values = torch.tensor([[float("inf"), 2.0, 0.0, -0.0, 2.0, 1e-40, 2.0, float("inf")]])
    assert beam.smallest(values, 7)[1].tolist() == [[2, 3, 5, 1, 4, 6, 0]]
