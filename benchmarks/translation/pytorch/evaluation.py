"""Translating the test part on all ranks, its BLEU, and the translations as a file to read.

A run that is asked to stop ends between two batches, once all ranks know of it (three batches): their size has to keep
a batch well below three seconds for a run to end within the ten of SIGTERM.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.pytorch.batches import SourceBatch

Score = Callable[[Sequence[Sequence[int]], DataSet], float]
"""BLEU of the test part's hypotheses, tokens without BOS and EOS, 0 to 100."""
Decode = Callable[[SourceBatch], List[List[int]]]
"""Translates a batch that is not empty: tokens of each sentence, without BOS and EOS."""
TRANSLATIONS = "translations.jsonl"


def translate(
    batches: Iterable[SourceBatch], sentences: int, decode: Decode, ranks: Ranks, run: Any
) -> Optional[List[List[int]]]:
    """Return the hypotheses of all sentences in order, on every rank; None where the run is to stop.

    Args:
        batches: this rank's, as many as any other one's.
        sentences: of the test part; each must be in one batch of one rank.
        decode: translates a batch.
        ranks: of the job.
        run: whose ``watch`` ends the evaluation early and whose ``interrupted`` says so.
    """
    indices: List[int] = []
    hypotheses: List[List[int]] = []
    for batch in run.watch(batches):
        if len(batch.indices):
            indices += batch.indices.tolist()
            hypotheses += decode(batch)
    if run.interrupted:
        return None
    return _in_order(*_gathered(indices, hypotheses, ranks), sentences)


def _gathered(indices: List[int], hypotheses: List[List[int]], ranks: Ranks) -> "tuple[List[int], List[List[int]]]":
    """Return those of all ranks."""
    lengths = [len(tokens) for tokens in hypotheses]
    mine = [len(indices), *indices, *lengths, *(token for tokens in hypotheses for token in tokens)]
    indices, hypotheses = [], []
    for numbers in _of_all_ranks(mine, ranks):
        count, begin = numbers[0], 1 + 2 * numbers[0]
        indices += numbers[1 : 1 + count]
        for length in numbers[1 + count : begin]:
            hypotheses.append(numbers[begin : begin + length])
            begin += length
    return indices, hypotheses


def _of_all_ranks(numbers: List[int], ranks: Ranks) -> List[List[int]]:
    """Return each rank's numbers. As tensors, since NCCL carries nothing else and pickles run code."""
    if ranks.size == 1:
        return [numbers]
    mine = torch.tensor(numbers, device=ranks.context)
    most = torch.tensor(len(numbers), device=ranks.context)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=pytorch.eager())
    filled = torch.nn.functional.pad(mine, (0, int(most) - len(mine)))
    found = [torch.empty_like(filled) for _ in range(ranks.size)]
    dist.all_gather(found, filled, group=pytorch.eager())
    return [tensor.tolist() for tensor in found]


def _in_order(indices: List[int], hypotheses: List[List[int]], sentences: int) -> List[List[int]]:
    if sorted(indices) != list(range(sentences)):
        raise RuntimeError(
            f"translated {len(indices)} sentences, of them {len(set(indices))} different, of {sentences}"
        )
    found: List[List[int]] = [[]] * sentences
    for index, tokens in zip(indices, hypotheses):
        found[index] = tokens
    return found


def of_text(count: Callable[[Sequence[str], Sequence[str]], float]) -> Score:
    """Return the score that compares text with the reference's lines."""
    return lambda hypotheses, data: count([data.vocabulary.text(each) for each in hypotheses], data.references)


def of_tokens(count: Callable[[Sequence[str], Sequence[str]], float]) -> Score:
    """Return the score that compares rejoined tokens with those of the reference, as the Transformer's submissions."""

    def score(hypotheses: Sequence[Sequence[int]], data: DataSet) -> float:
        joined, target = data.vocabulary.joined, data.test.target
        references = [joined(target[index].tolist()) for index in range(len(target))]
        return count([joined(each) for each in hypotheses], references)

    return score


def quality(
    hypotheses: Sequence[Sequence[int]],
    data: DataSet,
    scores: Mapping[str, Score],
    ranks: Ranks,
    output: Path,
    epoch: int,
) -> Dict[str, float]:
    """Return ``scores`` on every rank, found by rank 0, which also writes the texts to ``output``."""
    found = torch.zeros(len(scores), dtype=torch.float64, device=ranks.context)
    if ranks.rank == 0:
        found += torch.tensor([score(hypotheses, data) for score in scores.values()]).to(found)
        write_translations(output, epoch, [data.vocabulary.text(tokens) for tokens in hypotheses], data)
    pytorch.broadcast([found])
    return dict(zip(scores, found.tolist()))


def write_translations(output: Path, epoch: int, texts: Sequence[str], data: DataSet) -> None:
    """Replace ``translations.jsonl``: a line a sentence with epoch (from 1), index, source, hypothesis, reference."""
    fields = zip(data.sources, texts, data.references)
    _replace(
        output / TRANSLATIONS,
        (
            {"epoch": epoch, "index": index, "source": source, "hypothesis": hypothesis, "reference": reference}
            for index, (source, hypothesis, reference) in enumerate(fields)
        ),
    )


def score_translations(output: Path) -> None:
    """Give each line of ``translations.jsonl``, if there is one, scores of sacreBLEU: bleu and chrf, 0 to 100.

    For rank 0, after the clock of the run has stopped: it takes seconds.
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
    """Write JSON lines; whoever reads finds the old file or the new one whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        # Unicode knows more ends of lines than "\n"; JSON's escapes keep a sentence on its line for every reader.
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
