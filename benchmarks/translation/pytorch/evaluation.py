"""Translate the test part on all ranks, compute BLEU, and write the translations to a file.

A stop request takes effect between two batches, after all ranks have received it (three batches): a batch must take
well below three seconds for a run to stop within the ten seconds after SIGTERM.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.data.files import in_one_step
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.pytorch.batches import SourceBatch

# BLEU of the test part's hypotheses, tokens without BOS and EOS, 0 to 100.
Score = Callable[[Sequence[Sequence[int]], DataSet], float]
# Translates a non-empty batch to tokens per sentence, without BOS and EOS.
Decode = Callable[[SourceBatch], List[List[int]]]
TRANSLATIONS = "translations.jsonl"


def evaluate(
    network: torch.nn.Module,
    batches: Iterable[SourceBatch],
    decode: Decode,
    scores: Mapping[str, Score],
    data: DataSet,
    run: Any,
) -> Optional[Dict[str, float]]:
    """Return the ``scores`` of the translations of all test sentences; None if the run must stop.

    Rank 0 also writes the translations, see ``quality``.
    """
    network.eval()
    hypotheses = translate(batches, len(data.test), decode, run.ranks, run)
    network.train()
    if hypotheses is None:
        return None
    return quality(hypotheses, data, scores, run.ranks, run.output, run.epoch + 1)


def translate(
    batches: Iterable[SourceBatch], sentences: int, decode: Decode, ranks: Ranks, run: Any
) -> Optional[List[List[int]]]:
    """Return the hypotheses of all sentences in order, on all ranks; None if the run must stop.

    Args:
        batches: this rank's batches; all ranks have the same number.
        sentences: number of test sentences; each must be in a single batch, on a single rank.
        decode: translates a batch.
        ranks: of the job.
        run: ``interruptible`` stops the evaluation early and sets ``interrupted``.
    """
    indices: List[int] = []
    hypotheses: List[List[int]] = []
    for batch in run.interruptible(batches):
        if len(batch.indices):
            indices += batch.indices.tolist()
            hypotheses += decode(batch)
    if run.interrupted:
        return None
    return _of_all_ranks(indices, hypotheses, sentences, ranks)


def _of_all_ranks(indices: List[int], hypotheses: List[List[int]], sentences: int, ranks: Ranks) -> List[List[int]]:
    # Gather the tokens of all sentences in order; each sentence is on one rank.
    longest = torch.tensor([max(map(len, hypotheses), default=0)], device=ranks.context)
    if ranks.size > 1:
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=pytorch.eager())
    # Count, length and tokens per sentence, gathered as a sum of tensors: NCCL supports only tensors.
    rows = np.zeros((sentences, 2 + int(longest)), np.int64)
    for index, tokens in zip(indices, hypotheses):
        rows[index, : 2 + len(tokens)] += [1, len(tokens), *tokens]
    gathered = torch.from_numpy(rows).to(ranks.context)
    if ranks.size > 1:
        dist.all_reduce(gathered, group=pytorch.eager())
    times = gathered[:, 0]
    if bool((times != 1).any()):
        raise RuntimeError(
            f"translated {int(times.sum())} sentences, of them {int((times > 0).sum())} different, of {sentences}"
        )
    return [row[2 : 2 + row[1]] for row in gathered.tolist()]


def of_text(count: Callable[[Sequence[str], Sequence[str]], float]) -> Score:
    # Return the score that compares text with the reference's lines.
    return lambda hypotheses, data: count([data.vocabulary.text(ids) for ids in hypotheses], data.references)


def of_tokens(count: Callable[[Sequence[str], Sequence[str]], float]) -> Score:
    # Return a score function that compares rejoined tokens with the reference's, as in the Transformer's submissions.

    def score(hypotheses: Sequence[Sequence[int]], data: DataSet) -> float:
        joined, target = data.vocabulary.joined, data.test.target
        references = [joined(target[index].tolist()) for index in range(len(target))]
        return count([joined(ids) for ids in hypotheses], references)

    return score


def quality(
    hypotheses: Sequence[Sequence[int]],
    data: DataSet,
    scores: Mapping[str, Score],
    ranks: Ranks,
    output: Path,
    epoch: int,
) -> Dict[str, float]:
    # Return ``scores`` on every rank, found by rank 0, which also replaces ``translations.jsonl`` in ``output``: a line
    # per sentence with epoch (from 1), index, source, hypothesis, reference.
    totals = torch.zeros(len(scores), dtype=torch.float64, device=ranks.context)
    if ranks.rank == 0:
        totals += torch.tensor([score(hypotheses, data) for score in scores.values()]).to(totals)
        fields = zip(data.sources, (data.vocabulary.text(tokens) for tokens in hypotheses), data.references)
        _replace(
            output / TRANSLATIONS,
            (
                {"epoch": epoch, "index": index, "source": source, "hypothesis": hypothesis, "reference": reference}
                for index, (source, hypothesis, reference) in enumerate(fields)
            ),
        )
    pytorch.broadcast([totals])
    return dict(zip(scores, totals.tolist()))


def score_translations(output: Path) -> None:
    """Add sacreBLEU's bleu and chrf (0 to 100) to the lines of ``translations.jsonl``, if it exists.

    Call on rank 0 after the run's clock has stopped: it takes seconds.
    """
    import sacrebleu

    path = output / TRANSLATIONS
    if not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for name, score in (("bleu", sacrebleu.sentence_bleu), ("chrf", sacrebleu.sentence_chrf)):
            line[name] = round(float(score(line["hypothesis"], [line["reference"]]).score), 2)
    _replace(path, lines)


def _replace(path: Path, lines: Iterable[Any]) -> None:
    # Write JSON lines atomically: readers see the old or the new file.
    with in_one_step(path, durable=True) as file:
        # JSON escapes all line separators of Unicode, so a sentence is on one line for all readers.
        file.writelines(f"{json.dumps(line)}\n".encode() for line in lines)
