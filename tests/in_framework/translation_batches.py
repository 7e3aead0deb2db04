"""Batches next to their definition, resumed at any step, and an evaluation on any number of ranks.

The only argument is an empty folder. Rank 0 prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common.frameworks import pytorch
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.train import score_of
from benchmarks.translation.arrays import Pairs, Sentences
from benchmarks.translation.orders import Order, by_sentences, by_tokens, for_evaluation
from benchmarks.translation.pytorch import batches, evaluation
from benchmarks.translation.pytorch.batches import Batch, Shape, SourceBatch, TrainingInput
from benchmarks.translation.vocabulary import BOS, EOS, PAD, SPECIAL, SUBTOKENS, UNK, Vocabulary

WORDS = 20
LINES = ["ein Haus .", 'zwei\u2028Häuser "\\" .', "", "drei Katzen schlafen .", "ja", "nein nein nein", "x\u0085y"]


def sentences(lengths: np.ndarray, seed: int) -> Sentences:
    tokens = np.random.default_rng(seed).integers(4, WORDS, int(lengths.sum())).astype(np.uint16)
    return Sentences(tokens, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))


def pairs(count: int, longest: int) -> Pairs:
    numbers = np.random.default_rng(5)
    source, target = (numbers.integers(1, longest, count) for _ in range(2))
    return Pairs(sentences(source, 1), sentences(target, 2))


def plainly(one_side: Sentences, indices: np.ndarray, before: list[int], after: list[int]) -> list[list[int]]:
    return [before + one_side[index].tolist() + after for index in indices]


def without_padding(rows: Any) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in rows.tolist()]


def is_as_defined(batch: Batch, data: Pairs, order: Order, step: int, rank: int, ranks: int, shape: Shape) -> bool:
    indices = order.batch(step, rank, ranks)
    source = plainly(data.source, indices, [BOS] * shape.source_bos, [EOS])
    target_out = plainly(data.target, indices, [], [EOS])
    every = [order.batch(step, each, ranks) for each in range(ranks)]
    flat = batch.target_out.reshape(-1)
    return (
        without_padding(batch.source) == source
        and batch.source_lengths.tolist() == list(map(len, source))
        and without_padding(batch.target_out) == target_out
        and without_padding(batch.target_in) == plainly(data.target, indices, [BOS], [])
        and batch.target_in.shape == batch.target_out.shape
        and flat[batch.rows].tolist() == [token for row in target_out for token in row]
        and batch.tokens == len(batch.rows)
        and batch.all_tokens == sum(len(data.target[index]) + 1 for some in every for index in some)
        and batch.sentences == sum(map(len, every))
        and batch.source.shape[1] % shape.multiple == batch.target_in.shape[1] % shape.multiple == 0
        and batch.source.shape[1] - max(map(len, source)) < shape.multiple
    )


def training(ranks: Any) -> dict[str, bool]:
    data = pairs(300, 14)
    lengths = data.source.lengths, data.target.lengths
    orders = {
        "sentences": lambda epoch: by_sentences(
            *lengths, batch_size=4, ranks=ranks.size, seed=9, epoch=epoch, longest=14
        ),
        "tokens": lambda epoch: by_tokens(*lengths, tokens=80, ranks=ranks.size, seed=9, epoch=epoch, longest=16),
    }
    found = {}
    for name, order_of in orders.items():
        steps = order_of(0).steps
        for shape in (Shape(), Shape(source_bos=True, multiple=8)):
            wanted = range(2 * steps + 1)
            whole = take(TrainingInput(data, order_of, ranks, 0, shape), len(wanted))
            found[f"{name} {tuple(shape)}"] = all(
                is_as_defined(batch, data, order_of(step // steps), step % steps, ranks.rank, ranks.size, shape)
                for step, batch in zip(wanted, whole, strict=True)
            )
            for position in (1, steps - 1, steps, steps + 2):
                later = take(TrainingInput(data, order_of, ranks, position, shape, ahead=0), 3)
                expected = whole[position : position + 3]
                found[f"{name} {tuple(shape)} from {position}"] = all(map(same, later, expected)) and len(later) == 3
    return found


def take(source: TrainingInput, count: int) -> list[Batch]:
    taken = [source.next() for _ in range(count)]
    source.close()
    return taken


def same(ours: Batch, theirs: Batch) -> bool:
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(ours, theirs, strict=True))


def seconds_of_batch() -> float:
    """Of one with 5,120 positions, as many as a small GPU takes; built without a thread."""
    data = pairs(20_000, 60)
    order_of = partial(by_tokens, data.source.lengths, data.target.lengths, tokens=5120, ranks=1, seed=1, longest=64)
    order = order_of(epoch=0)
    ranks = SimpleNamespace(rank=0, size=1, context=pytorch.torch.device("cpu"))
    source = TrainingInput(data, lambda _: order, ranks, 0, Shape(multiple=8), ahead=0)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        source.next()
        times.append(time.perf_counter() - started)
    return sorted(times)[25]


def translated(count: int, batch_size: int, ranks: Any, interrupted: bool = False) -> list[list[int]] | None:
    """Translate by taking EOS away."""
    part = sentences(np.arange(count) % 5, 3)
    order = for_evaluation(part.lengths, batch_size=batch_size, ranks=ranks.size)

    def decode(batch: SourceBatch) -> list[list[int]]:
        rows = zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
        return [row[: length - 1] for row, length in rows]

    run = SimpleNamespace(watch=lambda batches: batches, interrupted=interrupted)
    some = batches.evaluation_batches(part, order, ranks)
    found = evaluation.translate(some, count, decode, ranks, run)
    assert found is None or found == [part[index].tolist() for index in range(count)]
    return found


def written(output: Path, ranks: Any) -> dict[str, Any]:
    """The file of translations, and the quality on all ranks."""
    entries = (*SPECIAL, "Haus", "ein", ".", "Ha@@", "us")
    sources = [line.upper() for line in LINES]
    data: Any = SimpleNamespace(vocabulary=Vocabulary(entries), references=LINES, sources=sources)
    hypotheses = [[5, 4, 6], [7, 8], [], [5], [1], [4, 4], [6]]

    def share(texts: Any, references: Any) -> float:
        assert references is LINES
        return sum(map(len, texts)) / 7

    found = evaluation.quality(hypotheses, data, {"share": evaluation.of_text(share)}, ranks, output, 3)["share"]
    pytorch.barrier()
    path = output / evaluation.TRANSLATIONS
    before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pytorch.barrier()
    if ranks.rank == 0:
        evaluation.score_translations(output)
        evaluation.score_translations(output / "nothing")
    pytorch.barrier()
    after = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {
        "quality": pytorch.total([found])[0] / ranks.size,
        "lines": before,
        "kept": [{name: line[name] for name in before[0]} for line in after] == before,
        "scores": [[line["bleu"], line["chrf"]] for line in after],
        "files": sorted(each.name for each in output.iterdir()),
    }


def judged() -> dict[str, float]:
    """BLEU by round of a sentence that misses its reference's text and matches its tokens, but one unknown to v0.5."""
    known = Vocabulary((*SPECIAL, "the_", "Haus_", "-_", "boot_", "\\u_"), SUBTOKENS)
    target = Sentences(np.array([4, 5, 6, 7, 8, 4, 5, UNK], np.uint16), np.array([0, 8]))
    data: Any = SimpleNamespace(vocabulary=known, references=["another text"], test=SimpleNamespace(target=target))
    configs = {name: Config(round=name) for name in ("v0.5", "v0.6", "v0.7")}
    configs["plain"] = Config(bleu="plain")
    return {name: score_of(config)([target[0].tolist()], data) for name, config in configs.items()}


def main() -> None:
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    checks = training(ranks)
    wrong = [name for name, is_right in checks.items() if not is_right]
    try:
        evaluation._in_order([0, 1, 1], [[1], [2], [3]], 3)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    found = {
        "wrong batches": pytorch.total([float(len(wrong))])[0],
        "batches": len(checks),
        "names": wrong,
        "translated": [len(translated(count, 2, ranks) or []) for count in (1, 2, 7, 12, 13)],
        "interrupted": translated(7, 2, ranks, interrupted=True),
        "twice": refused,
        "judged": judged(),
        "written": written(Path(sys.argv[1]), ranks),
        "milliseconds of a batch": 1e3 * seconds_of_batch(),
    }
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


if __name__ == "__main__":
    main()
