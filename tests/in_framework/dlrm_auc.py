"""The exact AUC of scores on any number of ranks beside its definition over all pairs; prints the differences."""

import json
from fractions import Fraction
from types import SimpleNamespace

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.dlrm.pytorch.auc import area_under_curve


def by_definition(scores, labels):
    """Share of (positive, negative) pairs in the right order; a tie is half a pair."""
    positive = [s for s, y in zip(scores.tolist(), labels.tolist()) if y]
    negative = [s for s, y in zip(scores.tolist(), labels.tolist()) if not y]
    twice = sum(2 * (p > n) + (p == n) for p in positive for n in negative)
    return float(Fraction(twice, 2 * len(positive) * len(negative)))


def cases():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2000, generator=generator)
    labels = (torch.rand(2000, generator=generator) < torch.sigmoid(normal)).float()
    yield "no ties", normal, labels
    yield "many ties", (normal * 4).round() / 4, labels
    yield "all tied", torch.zeros(2000), labels
    yield "both zeros", torch.where(normal > 0, torch.tensor(0.0), torch.tensor(-0.0)), labels
    yield "extremes", torch.where(normal > 1, torch.tensor(float("inf")), normal * 1e-42), labels
    yield "one bin", normal * 1e-6 + 1, labels
    yield "few", normal[:3], torch.tensor([0.0, 1.0, 0.0])
    yield "perfect", labels * 3 - 1, labels


def refusal(scores, labels):
    try:
        area_under_curve(scores, labels)
    except ValueError as error:
        return str(error)
    return ""


def main():
    ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
    differences = {}
    for name, scores, labels in cases():
        # Uneven shares, and none at all for some rank.
        cut = [len(scores) * rank // ranks.size for rank in range(ranks.size)] + [len(scores)]
        mine = slice(cut[ranks.rank], cut[ranks.rank + 1])
        differences[name] = area_under_curve(scores[mine], labels[mine]) - by_definition(scores, labels)
    found = {"differences": differences}
    found["not a number"] = refusal(torch.tensor([0.0, float("nan")]), torch.tensor([0.0, 1.0]))
    found["one class"] = refusal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]))
    if ranks.rank == 0:
        print(json.dumps(found))
    pytorch.finish()


main()
