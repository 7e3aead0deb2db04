"""GNMT, the Transformer and their common loss and beam search against recorded values."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.gnmt.pytorch import attention, model, train
from benchmarks.gnmt.pytorch.config import Config as GnmtConfig
from benchmarks.gnmt.pytorch.model import decode as decode_gnmt
from benchmarks.transformer.pytorch import packing
from benchmarks.transformer.pytorch import train as train_transformer
from benchmarks.transformer.pytorch.config import Config as TransformerConfig
from benchmarks.transformer.pytorch.model import Network, State, decode
from benchmarks.translation.pytorch import batches, beam, loss, operators
from benchmarks.translation.vocabulary import BOS, EOS, PAD
from tests.in_framework.torch_checks import (
    CPU,
    FlashCalls,
    assert_precisions_train,
    gradient_projection,
    projection,
    set_fixed_weights,
)
from tests.in_framework.waves import waves

ROWS, VOCABULARY, WIDTH, CHUNK = 50, 301, 24, 7


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
        total = (
            loss.smoothed_loss(hidden, weight, bias, targets, smoothing, CHUNK)
            if is_chunked
            else loss.plain_loss(torch.nn.functional.linear(hidden, weight, bias), targets, smoothing)
        )
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
    (hidden, weight, _), targets = example()
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    of_rows, total = (loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=some) for some in (rows, None))
    assert of_rows == total and loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1) == 0
    assert torch.autograd.grad(total, [hidden])[0][::5].abs().max() == 0
    frozen = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1), [weight])
    assert error(frozen, torch.autograd.grad(of_rows, [weight])) < 5e-6


def test_apex_is_missing():
    choose = partial(operators.choose, sizes={}, ranks=CPU, dtype=torch.float32, apex_modules={})
    for wanted, had, hint in (("apex", {}, "use kernels=auto"), ("auto", {"loss": "apex"}, "resume in its image")):
        with pytest.raises(ValueError, match=hint):
            choose(wanted, saved=had)


# -- beam search, with translations recorded from the algorithms of the submissions ---------------------------

TOKENS, SOURCE, LONGEST, SEEDS = 6, 3, 4, range(12)
GNMT_RULES = beam.Rules(beam.length_penalty(0.6, 6), beam.coverage_penalty(0.1), ended_stay=True)
TRANSFORMER_RULES = beam.Rules(beam.length_penalty(0.6, 5), shortest=1)


def scores_after(seed, prefix, levels):
    # Scores, whose sums are exact in fp32, and attention after a prefix, from a linear congruential generator; few
    # levels give equal scores
    number, numbers = seed * 7919 + 1, []
    for token in (*prefix, *[0] * (TOKENS + SOURCE)):
        number = (number * 1103515245 + 12345 + 7 * token) % 2**31
        numbers.append(number // 2**16)
    scores, attention = torch.tensor(numbers[len(prefix) :]).split((TOKENS, SOURCE))
    return scores % levels * (-8.0 / levels), (attention % 1024 / 256).softmax(0)


class Prefixes:
    # Each row's prefix and the seed of its sentence, and the number of rows that went through the scores_after

    def __init__(self, seeds, levels):
        self.seeds, self.levels, self.prefixes, self.rows = seeds, levels, [()] * len(seeds), 0

    def select(self, rows):
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        self.prefixes = [self.prefixes[row] for row in rows.tolist()]

    def step(self, tokens, position, state):
        self.rows += len(tokens)
        self.prefixes = [(*prefix, token) for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        assert {len(prefix) for prefix in self.prefixes} == {position + 1}
        return tuple(map(torch.stack, zip(*map(partial(scores_after, levels=self.levels), self.seeds, self.prefixes))))


def search(seeds, width, rules, longest=LONGEST, levels=1024):
    # Translations, and the number of rows that went through the scores_after
    state = Prefixes([seed for seed in seeds for _ in range(width)], levels)
    batch = batches.SourceBatch(np.arange(len(seeds)), torch.zeros(len(seeds), 1), torch.ones(len(seeds)))
    return beam.search(state.step, state, batch, beam=width, longest=longest, rules=rules), state.rows


# Tokens of each sentence, recorded from sequence_generator.py of GNMT's and fairseq's SequenceGenerator of the
# Transformer's submission, written in plain Python for one sentence
@pytest.mark.parametrize(
    ("rules", "width", "levels", "translations"),
    [
        (GNMT_RULES, 1, 1024, "15 41 5415 1451 4145 5 1445 5141 5411 1 545 4"),
        (GNMT_RULES, 1, 4, "41  4 511  1151 11 1 5141 141 11 "),
        (GNMT_RULES, 2, 1024, "15 1 54 1451  5 1445 5141 1141 1 545 "),
        (GNMT_RULES, 2, 4, "4141  4 5  1151  1 5141  11 "),
        (GNMT_RULES, 4, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT_RULES, 4, 4, "4141  51 5  1151  1 5141  11 "),
        (GNMT_RULES, 5, 1024, "15 1 54 1451  5 1445 5141 45 1 545 "),
        (GNMT_RULES, 5, 4, "4141  51 5  1151  1 5141  11 "),
        (TRANSFORMER_RULES, 1, 1024, "15 41 541 145 414 5 144 514 541 1 545 4"),
        (TRANSFORMER_RULES, 1, 4, "41 1 4 511 4 115 11 1 514 141 11 514"),
        (TRANSFORMER_RULES, 2, 1024, "15 1 54 141 4 5 1 514 114 1 545 4"),
        (TRANSFORMER_RULES, 2, 4, "41 1 51 5 4 1 115 1 515 14 11 514"),
        (TRANSFORMER_RULES, 4, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER_RULES, 4, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
        (TRANSFORMER_RULES, 5, 1024, "15 1 54 1 4 5 1 514 45 1 545 4"),
        (TRANSFORMER_RULES, 5, 4, "41 1 555 5 4 1 115 1 515 141 11 54"),
    ],
)
def test_search_is_the_submitted_algorithm(rules, width, levels, translations):
    tokens, _ = search(SEEDS, width, rules, levels=levels)
    assert " ".join("".join(map(str, sentence)) for sentence in tokens) == translations


@pytest.mark.parametrize("rules", [GNMT_RULES, TRANSFORMER_RULES])
def test_sentences_of_a_batch_are_translated_independently(rules):
    limits = [1 + max(1, seed % LONGEST) for seed in SEEDS]
    singles = [search([seed], 2, rules, limit) for seed, limit in zip(SEEDS, limits, strict=True)]
    # A sentence that has ended leaves the batch.
    expected = [sentences[0] for sentences, _ in singles], sum(rows for _, rows in singles)
    assert search(SEEDS, 2, rules, limits) == expected
    assert search([], 4, rules) == ([], 0)


def test_equal_scores_are_in_the_order_of_their_positions():
    values = torch.tensor([[float("inf"), 2.0, 0.0, -0.0, 2.0, 1e-40, 2.0, float("inf")]])
    assert beam.smallest(values, 7)[1].tolist() == [[2, 3, 5, 1, 4, 6, 0]]


GNMT_WORDS = 37
GNMT_CONFIG = GnmtConfig(device="cpu", precision="fp32", width=12, layers=4, dropout=0.0, initial_weights=0.6,
                optimizer_kernel="fused", batch_size=3, beam_size=3, max_length_test=14, warm_up_steps=1,
                vocabulary_multiple=1)  # fmt: skip
SOURCE_LENGTHS, TARGET_LENGTHS = (7, 6, 4), (3, 5, 7)  # tokens of each sentence, with BOS or EOS
pytorch.start(GNMT_CONFIG)


def gnmt_training(**settings):
    training = train.build(dataclasses.replace(GNMT_CONFIG, **settings), GNMT_WORDS, CPU, {})
    set_fixed_weights(training.network.parameters(), 0.6)
    return training


@pytest.fixture
def network():
    network = model.GNMT(GNMT_CONFIG, GNMT_WORDS).double().eval()
    set_fixed_weights(network.parameters(), 0.6)
    return network


@pytest.fixture
def batch():
    source, target_in, target_out = (torch.zeros(3, 7, dtype=torch.int64) for _ in range(3))
    for row, (source_length, length) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        words = [(5 * row + 7 * place) % 33 + 4 for place in range(source_length - 2)]
        source[row, :source_length] = torch.tensor([BOS, *words, EOS])
        words = [(11 * row + 3 * place) % 33 + 4 for place in range(length - 1)]
        target_in[row, :length], target_out[row, :length] = torch.tensor([BOS, *words]), torch.tensor([*words, EOS])
    rows = target_out.flatten().nonzero().flatten()
    return batches.Batch(source, torch.tensor(SOURCE_LENGTHS), target_in, target_out, rows, len(rows), len(rows), 3)


def log_probabilities(network, batch):
    return torch.log_softmax(network.classifier(network(batch.source, batch.source_lengths, batch.target_in)), 2)


def test_outputs_loss_and_gradients_match_the_submitted_network(network, batch):
    """GNMT and LabelSmoothing of NVIDIA's v0.7 submission (seq2seq/models, without fusion) in float64."""
    loss = network.loss_sum(batch)
    loss.backward()
    outputs = projection(log_probabilities(network, batch)[batch.target_out > 0])
    values = [outputs, loss.item(), gradient_projection(network.parameters())]
    assert values == pytest.approx([59.45216166, 58.02505087, 6.355842092], rel=1e-8)


@torch.no_grad()
def test_decoding_step_by_step_matches_all_positions_at_once(network, batch):
    """With two hypotheses for each sentence, which are reordered after each step."""
    expected, steps = log_probabilities(network, batch), []
    state = model.Decoding.of(network, network.encode(batch.source, batch.source_lengths), 2)
    for position in range(7):
        steps.append(state.step(batch.target_in[:, position, None].expand(-1, 2)))
        state.select(torch.tensor([1, 0, 3, 3, 5, 4]))
    outputs, weights = (torch.stack(tensors, 2) for tensors in zip(*steps, strict=True))
    torch.testing.assert_close(outputs, expected[:, None].expand_as(outputs), rtol=0, atol=1e-12)
    assert not weights.masked_select((torch.arange(7) >= batch.source_lengths[:, None])[:, None, None]).any()
    torch.testing.assert_close(weights.sum(3), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-12)


def test_attention_in_chunks_matches_plain_attention(monkeypatch):
    torch.manual_seed(0)
    padding = torch.arange(6) >= torch.tensor([6, 1, 4, 5]).unsqueeze(1)
    sizes = (4, 9, 8), (4, 6, 8), (8,), (4, 9, 6)
    *inputs, upstream = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)

    for limit in (1, 4000, 1 << 20):
        monkeypatch.setitem(attention.CHUNK_BYTES, "cpu", limit)
        weights = [attend(*inputs, padding) for attend in (attention.chunked, attention.plain)]
        results = ((each, torch.autograd.grad(each, inputs, upstream)) for each in weights)
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_translations_do_not_depend_on_the_batch(batch):
    """After training on these sentences translations end by themselves, at different lengths."""
    training = gnmt_training()
    for _ in range(80):
        train.train_step(training, batch, 0.01)
    training.network.eval()
    translations = decode_gnmt(
        training.network, GNMT_WORDS, batches.SourceBatch(torch.arange(3), batch.source, batch.source_lengths)
    )
    assert translations == [batch.target_out[row, : length - 1].tolist() for row, length in enumerate(TARGET_LENGTHS)]
    for row, length in enumerate(SOURCE_LENGTHS):
        sentence = batches.SourceBatch(
            torch.tensor([row]), batch.source[row : row + 1, :length], torch.tensor([length])
        )
        assert decode_gnmt(training.network, GNMT_WORDS, sentence) == [translations[row]]


def test_every_precision_trains_and_translates(batch):
    def losses_of(precision):
        training = gnmt_training(precision=precision)
        losses = [float(train.train_step(training, batch, 0.01)) for _ in range(8)]
        sources = batches.SourceBatch(torch.arange(3), batch.source, batch.source_lengths)
        assert len(decode_gnmt(training.network, GNMT_WORDS, sources)) == 3
        return losses

    assert_precisions_train(losses_of, bf16=0.02, fp16=0.005)


def test_updates_are_clipped_adam_on_the_loss_per_sentence(batch):
    """Losses and weights of torch.optim.Adam and clip_grad_norm_ in float64; the norm of the gradients is 3.5."""
    training = gnmt_training(gradient_clip=0.5, epsilon=1e-3)
    losses = [float(train.train_step(training, batch, 0.02)) for _ in range(2)]
    assert losses == pytest.approx([3.868336724, 3.576230241], abs=1e-5)
    assert projection(*training.network.parameters()) == pytest.approx(-103.829138, rel=1e-6)


def test_initial_weights_match_the_submitted_ones():
    weights = dict(model.GNMT(dataclasses.replace(GNMT_CONFIG, initial_weights=0.1), GNMT_WORDS).named_parameters())
    constants = {name: p.flatten()[0].item() for name, p in weights.items() if len(p.unique()) == 1}
    biases = [name for name in weights if name.endswith("bias_hh_l0") or name == "decoder.attention.bias"]
    assert constants == {**dict.fromkeys(biases, 0.0), "decoder.attention.scale": pytest.approx(12**-0.5)}
    limits = [float(p.detach().abs().max()) for name, p in weights.items() if name not in constants]
    assert min(limits) > 0.05 and max(limits) <= 0.1


TRANSFORMER_CONFIG = TransformerConfig(
    device="cpu", precision="fp32", layers=3, width=48, heads=4, inner_width=80, attention_bias=True, longest_offset=6,
    beam=3, dropout=0.0, attention_dropout=0.0, relu_dropout=0.0,
)  # fmt: skip
WORDS, POSITIONS = 61, 24


def transformer(**changes):
    network = Network(dataclasses.replace(TRANSFORMER_CONFIG, **changes), WORDS).eval()
    set_fixed_weights(network.parameters(), 0.5)
    return network


def sentences(*lengths):
    # int64 (sentences, longest): words, EOS, then PAD
    rows = [[4 + (7 * row + 5 * place) % (WORDS - 4) for place in range(length - 1)] + [EOS] * (length > 0)
            for row, length in enumerate(lengths)]  # fmt: skip
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


# nn.TransformerEncoder and nn.TransformerDecoder of PyTorch 2.13 in training mode and in float64, without dropout
@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize(
    ("norm", "expected"),
    [("pre", [48.90078302, 82.46612695, -34.67946504]), ("post", [-30.21321049, 123.3287405, -152.1774832])],
)
def test_logits_loss_and_gradients_match_pytorchs_modules(norm, attention, expected):
    network = transformer(norm=norm, attention=attention).double()
    network.dtype = torch.float64
    target = sentences(5, 8, 2)
    logits = network(sentences(9, 4, 7), target) @ network.table.weight.t()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    loss.backward()
    assert [projection(logits), loss.item(), projection(network.table.weight.grad)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.2)])
@torch.no_grad()
def test_decoding_with_a_cache(precision, tolerance):
    # Against the network on all tokens, also after the rows were reordered and a sentence has left
    network, source = transformer(precision=precision), sentences(9, 4, 7, 9)
    with pytorch.autocast(source.device, precision):
        state = State.of(network, source, 3)
    tokens, source = torch.full((12, 1), BOS), source.repeat_interleave(3, 0)
    for position in range(POSITIONS - 1):
        with pytorch.autocast(source.device, precision):
            log_probabilities = network.next(tokens[:, -1], position, state)
            hidden = network(source, tokens)[:, -1]
            expected = torch.log_softmax((hidden @ network.table.weight.t().to(hidden.dtype)).float(), 1)
        assert (log_probabilities - expected).abs().max() < tolerance
        # The second of four sentences leaves after six steps.
        rows = torch.tensor([1, 2, 0, *((7, 6, 8, 9, 9, 11) if position == 5 else range(3, len(tokens)))])
        state.select(rows)
        tokens = torch.cat((tokens[rows], 4 + (rows[:, None] * 11 + position) % (WORDS - 4)), 1)
        source = source[rows]


def test_a_batch_is_translated_as_its_sentences_are():
    network, source = transformer(), sentences(9, 4, 7, 1, 12)
    lengths = (source != PAD).sum(1)
    translations = decode(network, WORDS, batches.SourceBatch(np.arange(5), source, lengths))
    singles = [decode(network, WORDS, batches.SourceBatch(np.arange(1), row[None, :length], length[None]))
               for row, length in zip(source, lengths, strict=True)]  # fmt: skip
    assert [[translation] for translation in translations] == singles
    assert len({len(translation) for translation in translations}) > 1


# -- attention on packed rows ----------------------------------------------------------------------------------


def by_sentence(query, key, value, rows, keys, dropout, causal):
    # Attention per sentence
    lengths = [packed.offsets.diff().tolist() for packed in (rows, keys, keys)]
    sentences = zip(*(tensor.split(parts) for tensor, parts in zip((query, key, value), lengths)))
    return torch.cat(
        [
            packing.FUSED.args[0](*(heads.transpose(0, 1) for heads in parts), None, dropout, causal).transpose(0, 1)
            for parts in sentences
        ]
    )


def test_packed_rows_have_the_logits_and_gradients_of_padded_sentences():
    source, target = sentences(9, 4, 7), sentences(5, 8, 2)
    rows = [(ids != PAD).flatten().nonzero().flatten() for ids in (source, target)]
    results = []
    for attend, packed in ((None, None), (None, rows), (by_sentence, rows)):
        network = transformer().double()
        network.dtype = torch.float64
        if attend:
            network.set_packed_attention(attend)
        logits = network(source, target, rows=packed).view(-1, 48) @ network.table.weight.t()
        logits = logits if packed else logits[rows[1]]
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in network.parameters())])
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def test_flash_attention_is_chosen_where_it_is_correct_and_faster(monkeypatch):
    # On a CPU, attention per sentence stands in for the kernel.
    config = dataclasses.replace(TRANSFORMER_CONFIG, device="gpu", precision="bf16", batch_size=256)
    assert packing.choose(TRANSFORMER_CONFIG, CPU) is None and choices.resolved(config, {})["attention"] == "fused"
    assert packing.choose(config, CPU) is None, "flash fails on a CPU"
    with pytest.raises(choices.UnavailableError, match="attention=flash: no implementation runs on all ranks"):
        packing.choose(dataclasses.replace(config, attention="flash"), CPU)
    monkeypatch.setattr(packing, "flash", by_sentence)
    monkeypatch.setattr(packing.kernels, "seconds", lambda call: 0 * len(call()))
    assert packing.choose(config, CPU) is by_sentence and choices.resolved(config, {})["attention"] == "flash"
    monkeypatch.setattr(packing, "flash", lambda *tensors: by_sentence(*tensors) * 1.1)
    assert packing.choose(config, CPU) is None
    for changes in ({"device": "cpu"}, {"packed": False}, {"precision": "tf32"}):
        with pytest.raises(ValueError, match="attention=flash requires device=gpu, packed=true and precision"):
            dataclasses.replace(config, attention="flash", **changes)


def test_arguments_of_flash_attention_on_a_gpu():
    # Without a GPU, only the arguments and shapes of the kernels are checked.
    rows, keys = (
        packing.Packing(*(tensor.to("meta") for tensor in packing.Packing.of(ids, ids.nonzero()[:, 0])))
        for ids in (sentences(9, 4), sentences(5, 6))
    )
    inputs = [
        torch.empty(count, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for count in (13, 11, 11)
    ]
    with FlashCalls() as calls:
        attn_out = packing.flash(*inputs, rows, keys, 0.1, False)
        gradients = torch.autograd.grad(attn_out.sum(), inputs)
    assert [tensor.shape for tensor in (attn_out, *gradients)] == [inputs[0].shape, *(each.shape for each in inputs)]
    expected = [rows.offsets, keys.offsets, 9, 6, 0.1, False]
    for (arguments, _), first in zip(calls.found, (3, 6), strict=True):
        assert all(a is b or a == b for a, b in zip(arguments[first : first + 6], expected, strict=True))


@pytest.mark.parametrize(("flash", "graphs"), [(False, 2), (True, 1)])
def test_warm_up_compiles_everything_that_training_needs(flash, graphs):
    torch._dynamo.reset()  # graphs of other tests count towards the recompile limit
    compiled = []
    config = dataclasses.replace(
        TRANSFORMER_CONFIG, device="gpu", precision="bf16", layers=1, batch_size=1024, max_length=32, compile=True
    )
    network = Network(config, WORDS)
    if flash:
        network.set_packed_attention(packing.FUSED)
    network.compile(dynamic=True, backend=lambda graph, inputs: compiled.append(graph) or graph)
    examples = train_transformer.warm_up_batches(config, WORDS, CPU)
    for batch in examples:
        network.loss_sum(batch)
    assert len(compiled) == graphs
    generator = torch.Generator().manual_seed(3)
    for count, shortest in ((7, 31), (16, 1), (30, 9), (64, 2), (9, 30)):
        lengths = torch.randint(shortest, 32, (2, count), generator=generator)
        network.loss_sum(batches.synthetic_pairs(WORDS, lengths, CPU))
    assert len(compiled) == graphs
