"""Answering all questions on all ranks: the spans of each window, gathered once, and what the answers are worth."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
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
FIELDS = 4  # whether a span is there, its score, begin and end


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
    # Each window is one rank's: the sums are its spans.
    gathered = torch.from_numpy(fields).to(run.ranks.context)
    if run.ranks.size > 1:
        dist.all_reduce(gathered, group=pytorch.eager())
    by_question: Dict[int, List[Span]] = defaultdict(list)
    for owner, rows in zip(data.test.question[:].tolist(), gathered.tolist()):
        by_question[owner] += [Span(score, int(start), int(end)) for there, score, start, end in rows if there]
    return [best_of(by_question[number], config.n_best) for number in range(len(data.questions))]


def quality(predictions: Sequence[Sequence[Span]], data: DataSet, ranks: Ranks, output: Path) -> Dict[str, float]:
    # Return F1 and exact match, 0 to 100, on every rank, found by rank 0, which also writes the answers.
    values = torch.zeros(2, dtype=torch.float64, device=ranks.context)
    if ranks.rank == 0:
        questions = data.questions
        texts = [text_of(spans, question.context) for spans, question in zip(predictions, questions)]
        result = score(texts, [question.references for question in questions])
        values += torch.tensor([result.f1, result.exact_match], dtype=torch.float64, device=ranks.context)
        # The form that SQuAD's evaluate-v1.1.py reads, and that of run_squad.py.
        _replace(output / PREDICTIONS, {question.id: text for question, text in zip(questions, texts)})
        _replace(
            output / BEST,
            {question.id: _listed(spans, question.context) for spans, question in zip(predictions, questions)},
        )
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
