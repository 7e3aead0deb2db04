"""Answer all questions on all ranks: the spans of the windows are gathered once and scored."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.bert_squad.answers import Span, best_spans, score
from benchmarks.bert_squad.arrays import DataSet
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch
from benchmarks.common.data.files import in_one_step
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks

PREDICTIONS, BEST = "predictions.json", "nbest_predictions.json"
FIELDS = 4  # flag for a span, score, start and end


def answer(
    config: Config,
    batches: Iterable[Batch],
    data: DataSet,
    logits: Callable[[Batch], torch.Tensor],
    run: Any,
) -> Optional[List[List[Span]]]:
    """Return the best spans of all questions, on all ranks; None if the run must stop.

    Args:
        config: of the run.
        batches: this rank's windows of the test part; all ranks have the same number of batches.
        data: data set with the test part.
        logits: computes (T, 2) for a non-empty batch.
        run: ``interruptible`` stops the evaluation early and sets ``interrupted``.
    """
    fields, answered = np.zeros((len(data.test), config.n_best, FIELDS)), 0
    for batch in run.interruptible(batches):
        answered += len(batch.start)
        if not len(batch.start):
            continue
        bounds, values = batch.rows.offsets.tolist(), logits(batch).cpu().numpy()
        for index, start, end in zip(batch.indices.tolist(), bounds, bounds[1:]):
            first, last = values[start:end].T
            spans = best_spans(first, last, data.test.places(index), config.n_best, config.longest_answer)
            for rank, span in enumerate(spans):
                fields[index, rank] = (1.0, *span)
    if run.interrupted:
        return None
    run.total([float(answered)], len(data.test))
    # Every window is on one rank only: the sum over ranks gathers the spans.
    gathered = torch.from_numpy(fields).to(run.ranks.context)
    if run.ranks.size > 1:
        dist.all_reduce(gathered, group=pytorch.eager())
    by_question: Dict[int, List[Span]] = defaultdict(list)
    for owner, rows in zip(data.test.question[:].tolist(), gathered.tolist()):
        by_question[owner] += [Span(score, int(start), int(end)) for there, score, start, end in rows if there]
    # Best first; earlier windows first for equal scores.
    ranked = (sorted(by_question[number], key=lambda span: -span.score) for number in range(len(data.questions)))
    return [spans[: config.n_best] for spans in ranked]


def quality(predictions: Sequence[Sequence[Span]], data: DataSet, ranks: Ranks, output: Path) -> Dict[str, float]:
    # Return F1 and exact match, 0 to 100, on every rank, found by rank 0, which also writes the answers.
    values = torch.zeros(2, dtype=torch.float64, device=ranks.context)
    if ranks.rank == 0:
        questions = data.questions
        contexts = (question.context for question in questions)
        texts = [text[spans[0].begin : spans[0].end] if spans else "" for spans, text in zip(predictions, contexts)]
        scores = score(texts, [question.references for question in questions])
        values += torch.tensor(scores, dtype=torch.float64, device=ranks.context)
        # Formats of SQuAD's evaluate-v1.1.py and of run_squad.py.
        _replace(output / PREDICTIONS, {question.id: text for question, text in zip(questions, texts)})
        _replace(
            output / BEST,
            {question.id: _listed(spans, question.context) for spans, question in zip(predictions, questions)},
        )
    pytorch.broadcast([values])
    f1, exact_match = values.tolist()
    return {"f1": f1, "exact_match": exact_match}


def _listed(spans: Sequence[Span], context: str) -> List[Dict[str, Any]]:
    # Return spans with probabilities, normalized over the list.
    weights = [math.exp(span.score - spans[0].score) for span in spans]
    return [
        {"text": context[span.begin : span.end], "probability": weight / sum(weights), "score": span.score}
        for span, weight in zip(spans, weights)
    ]


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    # Write JSON atomically: readers see the old or the new file.
    with in_one_step(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=0).encode())
