"""Batches against their definition, resumed at any step, and an evaluation on one and three ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.data.arrays import Sequences
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.train import score_of
from benchmarks.translation.arrays import Pairs
from benchmarks.translation.orders import by_sentences, by_tokens, for_evaluation
from benchmarks.translation.pytorch import batches, evaluation
from benchmarks.translation.pytorch.batches import Shape, training_input
from benchmarks.translation.vocabulary import BOS, EOS, PAD, SPECIAL, SUBTOKENS, UNK, Vocabulary

LONG = True
RANKS = (1, 3)
WORDS = 20
LINES = ["ein Haus .", 'zwei\u2028Häuser "\\" .', "", "drei Katzen schlafen .", "ja", "nein nein nein", "x\u0085y"]


def sentences(lengths, seed):
    tokens = np.random.default_rng(seed).integers(4, WORDS, int(lengths.sum())).astype(np.uint16)
    return Sequences(tokens, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))


def batches_from(ranks, order_of, shape, position, count):
    stream = training_input(DATA, order_of, ranks, position, shape, ahead=4 if position == 0 else 0)
    batches = [next(stream) for _ in range(count)]
    stream.close()
    return batches


def fields(batch):
    # All fields of a batch, sentences without their padding; the padded widths
    values = {**batch._asdict(), "source_lengths": batch.source_lengths.tolist()}
    for name in ("source", "target_in", "target_out"):
        values[name] = [[token for token in row if token != PAD] for row in getattr(batch, name).tolist()]
    values["rows"] = batch.target_out.flatten()[batch.rows].tolist()
    values["source_rows"] = batch.source.flatten()[batch.source_rows].tolist()
    return values, tuple(ids.shape[1] for ids in (batch.source, batch.target_in, batch.target_out))


def expected_fields(order, step, ranks, shape):
    # The same by definition
    parts = [order.batch(step, rank, ranks.size).tolist() for rank in range(ranks.size)]
    source = [[BOS] * shape.source_bos + DATA.source[index].tolist() + [EOS] for index in parts[ranks.rank]]
    targets = [[*DATA.target[index].tolist(), EOS] for index in parts[ranks.rank]]
    everything = [index for part in parts for index in part]
    widths = [-(-max(map(len, rows)) // shape.multiple) * shape.multiple for rows in (source, targets)]
    return {
        "source": source,
        "source_lengths": list(map(len, source)),
        "target_in": [[BOS, *row[:-1]] for row in targets],
        "target_out": targets,
        "rows": [token for row in targets for token in row],
        "tokens": sum(map(len, targets)),
        "all_tokens": sum(len(DATA.target[index]) + 1 for index in everything),
        "sentences": len(everything),
        "source_rows": [token for row in source for token in row],
        "all_source_tokens": sum(len(DATA.source[index]) + 1 + shape.source_bos for index in everything),
    }, (widths[0], widths[1], widths[1])


LENGTHS = [np.random.default_rng(seed).integers(1, 14, 300) for seed in (5, 6)]
DATA = Pairs(*(sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)))


@pytest.mark.parametrize("shape", [Shape(), Shape(source_bos=True, multiple=8)])
@pytest.mark.parametrize("rule", [by_sentences, by_tokens])
def test_batches_are_those_of_the_order_from_any_position(rule, shape, ranks):
    limits = {"batch_size": 4, "longest": 14} if rule is by_sentences else {"tokens": 80, "longest": 16}

    def order_of(epoch):
        return rule(*LENGTHS, ranks=ranks.size, seed=9, epoch=epoch, **limits)

    steps = order_of(0).steps
    stream = [fields(batch) for batch in batches_from(ranks, order_of, shape, 0, 2 * steps + 1)]
    for number, batch in enumerate(stream):
        assert batch == expected_fields(order_of(number // steps), number % steps, ranks, shape), number
    for position in (1, steps - 1, steps, steps + 2):
        resumed = [fields(batch) for batch in batches_from(ranks, order_of, shape, position, 3)]
        assert resumed == stream[position : position + 3]


def test_noise_has_no_padding(ranks):
    batch, widths = fields(batches.synthetic_batch(WORDS, 3, 5, ranks))
    assert (widths, batch["source_lengths"], batch["tokens"]) == ((5, 5, 5), [5, 5, 5], 15)
    assert (batch["all_tokens"], batch["sentences"]) == (15 * ranks.size, 3 * ranks.size)
    assert [row[0] for row in batch["target_in"]] == [BOS] * 3 and [row[-1] for row in batch["source"]] == [EOS] * 3
    assert [row[1:] for row in batch["target_in"]] == [row[:-1] for row in batch["target_out"]]


@pytest.mark.parametrize("count", [1, 2, 7, 12, 13])
def test_each_sentence_is_translated_once(count, ranks):
    part = sentences(np.arange(count) % 5, 3)
    order = for_evaluation(part.lengths, batch_size=2, ranks=ranks.size)

    def without_eos(batch):
        rows = zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
        return [row[: length - 1] for row, length in rows]

    for interrupted in (False, True):
        run = SimpleNamespace(interruptible=iter, interrupted=interrupted)
        some = batches.evaluation_batches(part, order, ranks)
        translations = evaluation.translate(some, count, without_eos, ranks, run)
        assert translations == (None if interrupted else [part[index].tolist() for index in range(count)])
    size = ranks.size
    with pytest.raises(RuntimeError, match=f"translated {3 * size} sentences, of them 2 different, of 3"):
        evaluation._of_all_ranks([0, 1, 1], [[1], [2], [3]], 3, ranks)


def test_translations_and_their_scores_can_be_read(ranks, tmp_path_factory):
    entries = (*SPECIAL, "Haus", "ein", ".", "Ha@@", "us")
    sources = [line.upper() for line in LINES]
    data = SimpleNamespace(vocabulary=Vocabulary(entries), references=LINES, sources=sources)
    hypotheses = [[5, 4, 6], [7, 8], [], [5], [1], [4, 4], [6]]
    output = tmp_path_factory.mktemp("output")
    scores = {"letters": evaluation.of_text(lambda texts, _: sum(map(len, texts)) / 7)}
    assert evaluation.quality(hypotheses, data, scores, ranks, output, 3) == {"letters": pytest.approx(32 / 7)}
    if ranks.rank == 0:
        evaluation.score_translations(output)
        evaluation.score_translations(output / "nothing")
        lines = [json.loads(line) for line in (output / evaluation.TRANSLATIONS).read_text().split("\n")[:-1]]
        texts = ["ein Haus .", "Haus", "", "ein", "<unk>", "Haus Haus", "."]
        expected = zip(range(7), sources, texts, LINES, strict=True)
        names = ("epoch", "index", "source", "hypothesis", "reference")
        assert [{name: line[name] for name in names} for line in lines] == [
            dict(zip(names, (3, *values), strict=True)) for values in expected
        ]
        assert [(line["bleu"], line["chrf"]) for line in lines][::4] == [(100, 100), (0, 0)]
        assert [path.name for path in output.iterdir()] == [evaluation.TRANSLATIONS]


def test_bleu_of_the_transformer_is_that_of_the_round():
    # Over tokens of both sides; v0.5 matches no unknown word: 5 of 6 words, 4 of 5 pairs, 3 of 4, 2 of 3.
    vocabulary = Vocabulary((*SPECIAL, "the_", "Haus_", "-_", "boot_", "\\u_"), SUBTOKENS)
    target = Sequences(np.array([4, 5, 6, 7, 8, 4, 5, UNK], np.uint16), np.array([0, 8]))
    data = SimpleNamespace(vocabulary=vocabulary, references=["another text"], test=SimpleNamespace(target=target))
    configs = {name: Config(round=name) for name in ("v0.5", "v0.6", "v0.7")}
    scores = {name: score_of(config)([target[0].tolist()], data) for name, config in configs.items()}
    assert scores == pytest.approx({"v0.5": 100 * 3**-0.25, "v0.6": 100, "v0.7": 100})
    assert score_of(Config(bleu="plain"))([target[0].tolist()], data) < 30
