"""Answering all questions on all ranks: the spans of each window, gathered once, and what the answers are worth."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from benchmarks.bert_squad.answers import Span, best_of, best_spans, score, text_of
from benchmarks.bert_squad.arrays import DataSet
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch
from benchmarks.common.data.files import in_one_step
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks

PREDICTIONS, BEST = "predictions.json", "nbest_predictions.json"
FIELDS = 4  # window, score, begin and end of a span


def answer(
    config: Config,
    batches: Iterable[Batch],
    data: DataSet,
    logits: Callable[[Batch], torch.Tensor],
    run: Any,
) -> Optional[List[List[Span]]]:
    """Return the best spans of each question, on every rank; None where the run is to stop.

    Args:
        config: of the run.
        batches: this rank's windows of the test part, as many batches as any other one's.
        data: whose test part it is.
        logits: (T, 2) of a batch that is not empty.
        run: whose ``interruptible`` ends the evaluation early and whose ``interrupted`` says so.
    """
    rows: List[List[float]] = []
    answered = 0
    for batch in run.interruptible(batches):
        answered += len(batch.start)
        if len(batch.start):
            rows += _spans_of(config, batch, data, logits(batch).cpu())
    if run.interrupted:
        return None
    run.total([float(answered)], len(data.test))
    return _by_question(_of_all_ranks(rows, run.ranks), data, config.n_best)


def _spans_of(config: Config, batch: Batch, data: DataSet, logits: torch.Tensor) -> List[List[float]]:
    bounds = batch.rows.offsets.tolist()
    values = logits.numpy()
    found = []
    for index, begin, end in zip(batch.indices.tolist(), bounds, bounds[1:]):
        first, last = values[begin:end].T
        places = data.test.places(index)
        spans = best_spans(first, last, places, config.n_best, config.longest_answer)
        found += [[float(index), *map(float, span)] for span in spans]
    return found


def _of_all_ranks(rows: List[List[float]], ranks: Ranks) -> List[List[float]]:
    # Return the rows of all ranks, which may be of different numbers. As tensors: pickles run code.
    if ranks.size == 1:
        return rows
    # NCCL carries nothing that is on a CPU.
    mine = torch.tensor(rows, dtype=torch.float64, device=ranks.context).reshape(-1, FIELDS)
    counts = [torch.zeros((), dtype=torch.int64, device=ranks.context) for _ in range(ranks.size)]
    dist.all_gather(counts, torch.tensor(len(rows), device=ranks.context), group=pytorch.eager())
    sizes = [int(count) for count in counts]
    filled = torch.nn.functional.pad(mine, (0, 0, 0, max(sizes) - len(rows)))
    found = [torch.empty_like(filled) for _ in range(ranks.size)]
    dist.all_gather(found, filled, group=pytorch.eager())
    return [row for tensor, size in zip(found, sizes) for row in tensor[:size].tolist()]


def _by_question(rows: Sequence[Sequence[float]], data: DataSet, count: int) -> List[List[Span]]:
    spans: Dict[int, List[Span]] = defaultdict(list)
    owners = data.test.question[:].tolist()
    # The order of the windows, whichever rank had them: of equal spans the first one counts.
    for index, value, begin, end in sorted(rows, key=lambda row: row[0]):
        spans[owners[int(index)]].append(Span(value, int(begin), int(end)))
    return [best_of(spans[number], count) for number in range(len(data.questions))]


def quality(found: Sequence[Sequence[Span]], data: DataSet, ranks: Ranks, output: Path) -> Dict[str, float]:
    # Return F1 and exact match, 0 to 100, on every rank, found by rank 0, which also writes the answers.
    values = torch.zeros(2, dtype=torch.float64, device=ranks.context)
    if ranks.rank == 0:
        questions = data.questions
        texts = [text_of(spans, asked.context) for spans, asked in zip(found, questions)]
        result = score(texts, [asked.references for asked in questions])
        values += torch.tensor([result.f1, result.exact_match], dtype=torch.float64, device=ranks.context)
        # The form that SQuAD's evaluate-v1.1.py reads, and that of run_squad.py.
        _replace(output / PREDICTIONS, {asked.id: text for asked, text in zip(questions, texts)})
        _replace(output / BEST, {asked.id: _listed(spans, asked.context) for spans, asked in zip(found, questions)})
    pytorch.broadcast([values])
    f1, exact_match = values.tolist()
    return {"f1": f1, "exact_match": exact_match}


def _listed(spans: Sequence[Span], context: str) -> List[Dict[str, Any]]:
    # Return spans with their shares of the probability of all that are listed.
    weights = [math.exp(span.score - spans[0].score) for span in spans]
    return [
        {"text": context[span.begin : span.end], "probability": weight / sum(weights), "score": span.score}
        for span, weight in zip(spans, weights)
    ]


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    # Write JSON; whoever reads finds the old file or the new one whole.
    with in_one_step(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=0).encode())
