"""The rules of each round as data: runs per benchmark, quality targets, what is dropped, sizes of the data.

Sources, named at each table:

* the MLPerf Training rules of each round (mlcommons/training_policies, ``training_rules.adoc``);
* the rule files of mlperf-logging 4.1.68 (``compliance_checker/training_<ruleset>/closed_<benchmark>.yaml``
  and ``benchmark_meta.py``), which decide where text and checker differ;
* the submitted logs and scripts of mlcommons/training_results_v0.5, v0.6 and v0.7.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

Run = TypeVar("Run")

ROUNDS = (
    "v0.5", "v0.6", "v0.7", "v1.0", "v1.1", "v2.0", "v2.1", "v3.0", "v3.1", "v4.0", "v4.1", "v5.0", "v5.1",
)  # fmt: skip

BLEU_BENCHMARKS = frozenset({"gnmt", "transformer"})
"""Their quality is BLEU, kept here as 0 to 100; v0.7 logs write 0 to 1."""


_FLOAT32 = 1e-7
"""Relative error of float32, through which some logs of v0.5 and v0.6 went: 21.799999 for 21.8. From v0.7 on the
official checker compares exactly."""
_WITH_SLACK = frozenset({"v0.5", "v0.6"})


@dataclass(frozen=True)
class Target:
    """A quality to reach; ``name`` is the part of the logged value it is about, else "value"."""

    name: str
    value: float
    unit: str
    higher_is_better: bool = True
    limit: float = 1.0
    """The end of the unit's range on the better side, as ATLEAST_ONE_CHECK has it: what lies there or beyond is no
    such quality, but per cent in place of a fraction, for example."""
    slack: float = 0.0

    @property
    def quality(self) -> str:
        """What the target is of, without its range."""
        return self.unit.partition(",")[0]

    def met_by(self, quality: Mapping[str, float]) -> bool:
        """Return whether a quality reaches the target."""
        found = quality.get(self.name)
        if found is None or self.out_of_range(found):
            return False
        return found >= self.value - self.slack if self.higher_is_better else found <= self.value + self.slack

    def out_of_range(self, found: float) -> bool:
        """Return whether the unit has no such value on its better side."""
        return found >= self.limit if self.higher_is_better else found <= self.limit


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one round asks of one benchmark."""

    round: str
    benchmark: str
    runs: int
    targets: tuple[Target, ...]
    dropped_each_side: int = 1
    may_miss: int = 1
    """Runs that may miss the target and then count as the slowest."""
    first_converging: int | None = None
    """NCF of v0.5: the score takes this many runs, the first that converge."""

    def counted(self, ordered: Sequence[Run], missed: int) -> Sequence[Run]:
        """Return the runs that the score is the mean of, from those that converged, the fastest first.

        Runs that missed the target are the slowest, and dropped before others.
        """
        slowest = 0 if self.first_converging else missed
        return ordered[self.dropped_each_side : len(ordered) - max(self.dropped_each_side - slowest, 0)]


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Numbers of training and evaluation samples of a benchmark's real data set."""

    train: int | None
    evaluate: int | None
    source: str
    least_train: int | None = None
    """Least ``train_samples`` of a submitted log, where it is not ``train``."""
    least_evaluate: int | None = None
    in_batches: bool = False
    """Whether ``train_samples`` may be the number of batches."""
    also: frozenset[int] = frozenset()
    """Other counts in submitted logs: batches of an evaluation, samples of one rank."""


_ALIASES = {
    "image_classification": "resnet", "resnet50": "resnet", "resnet-50": "resnet",
    "single_stage_detector": "ssd", "ssd-resnet34": "ssd",
    "object_detection": "maskrcnn", "mask": "maskrcnn", "mask_rcnn": "maskrcnn", "mask-rcnn": "maskrcnn",
    "rnn_translator": "gnmt", "nmt": "gnmt", "translation": "transformer",
    "recommendation": "ncf", "reinforcement": "minigo", "reinforcement_learning": "minigo",
    "dlrm-dcnv2": "dlrm_dcnv2", "recommendation_v2": "dlrm_dcnv2", "language_model": "bert",
    "rnn_speech_recognition": "rnnt", "rnn-t": "rnnt", "image_segmentation": "unet3d", "3d-unet": "unet3d",
    "gpt-3": "gpt3", "large_language_model": "gpt3", "stable-diffusion": "stable_diffusion",
    "graph_neural_network": "gnn", "r-gat": "rgat", "llama2-70b-lora": "llama2_70b_lora",
    "llama3.1_405b": "llama31_405b", "llama3.1_8b": "llama31_8b", "small_llm_pretraining": "llama31_8b",
}  # fmt: skip
"""Other names in logs and folders: the task folders of the reference implementations, Google's ``mask`` of v0.6."""
_HPC = frozenset({"cosmoflow", "deepcam", "oc20", "openfold"})
"""Benchmarks of MLPerf HPC, whose rounds have the same numbers and rules of their own."""

# Runs per benchmark: training_rules.adoc of v0.5 (minigo: 10 were submitted and accepted where the text says
# 20), from v0.7 on benchmark_meta.py. v0.5's NCF: "run 100, use the first 50 that converge".
_RUNS = {
    "resnet": 5, "ssd": 5, "maskrcnn": 5, "gnmt": 10, "transformer": 10, "minigo": 10, "bert": 10, "dlrm": 5,
    "dlrm_dcnv2": 10, "rnnt": 10, "unet3d": 40, "gpt3": 3, "stable_diffusion": 10, "llama2_70b_lora": 10,
    "gnn": 10, "rgat": 10, "retinanet": 5, "llama31_405b": 3, "llama31_8b": 10, "flux1": 10,
}  # fmt: skip

_TOP1, _MAP, _BLEU = "top-1 accuracy", "mAP", "BLEU, 0 to 100"


_WITH_1 = math.nextafter(1.0, 2.0)
"""Limit of a unit whose 1.0 itself is a value."""


def _one(value: float, unit: str, limit: float = 1.0) -> tuple[Target, ...]:
    return (Target(name="value", value=value, unit=unit, limit=limit),)


def _at_most(value: float, unit: str, limit: float = 0.0) -> tuple[Target, ...]:
    return (Target(name="value", value=value, unit=unit, higher_is_better=False, limit=limit),)


_MASKRCNN = (
    Target(name="BBOX", value=0.377, unit="box mAP"),
    Target(name="SEGM", value=0.339, unit="mask mAP"),
)
_STABLE_DIFFUSION = (
    Target(name="FID", value=90.0, unit="FID", higher_is_better=False, limit=math.nextafter(0.0, -1.0)),
    Target(name="CLIP", value=0.15, unit="CLIP score", limit=_WITH_1),
)

# (benchmark, first round, last round, targets). v0.5: eval_target events of the submitted logs, minigo from
# the rules' text. v0.6: the submitted code and logs; its checker holds no target. From v0.7 on:
# ATLEAST_ONE_CHECK of closed_<benchmark>.yaml; BERT's second v0.7 target is there, not in the text.
_TARGETS: tuple[tuple[str, str, str, tuple[Target, ...]], ...] = (
    ("resnet", "v0.5", "v0.5", _one(0.749, _TOP1)),
    ("resnet", "v0.6", "v4.0", _one(0.759, _TOP1)),
    ("ssd", "v0.5", "v0.5", _one(0.212, _MAP)),
    ("ssd", "v0.6", "v1.1", _one(0.23, _MAP)),
    ("ssd", "v2.0", "v5.1", _one(0.34, _MAP)),
    ("retinanet", "v5.0", "v5.1", _one(0.34, _MAP)),
    ("maskrcnn", "v0.5", "v3.1", _MASKRCNN),
    ("gnmt", "v0.5", "v0.5", _one(21.8, _BLEU, 100.0)),
    ("gnmt", "v0.6", "v0.7", _one(24.0, _BLEU, 100.0)),
    ("transformer", "v0.5", "v0.7", _one(25.0, _BLEU, 100.0)),
    ("ncf", "v0.5", "v0.5", _one(0.635, "HR@10")),
    ("minigo", "v0.5", "v0.5", _one(0.4, "professional moves predicted")),
    ("minigo", "v0.6", "v2.1", _one(0.5, "win rate")),
    ("bert", "v0.7", "v0.7", _one(0.712, "masked LM accuracy")),
    ("bert", "v1.0", "v5.1", _one(0.72, "masked LM accuracy")),
    ("dlrm", "v0.7", "v2.1", _one(0.8025, "AUC")),
    ("dlrm_dcnv2", "v3.0", "v5.1", _one(0.80275, "AUC", _WITH_1)),
    ("rnnt", "v1.0", "v3.1", _at_most(0.058, "word error rate")),
    ("unet3d", "v1.0", "v4.0", _one(0.908, "mean DICE", _WITH_1)),
    ("gpt3", "v3.0", "v4.1", _at_most(2.69, "log perplexity", 2.6)),
    ("llama2_70b_lora", "v4.0", "v5.1", _at_most(0.925, "cross entropy")),
    ("gnn", "v4.0", "v4.1", _one(0.72, "accuracy")),
    ("rgat", "v5.0", "v5.1", _one(0.72, "accuracy")),
    ("llama31_405b", "v5.0", "v5.1", _at_most(5.6, "log perplexity")),
    ("llama31_8b", "v5.1", "v5.1", _at_most(3.3, "log perplexity")),
    ("flux1", "v5.1", "v5.1", _at_most(0.586, "validation loss")),
    ("stable_diffusion", "v3.1", "v5.0", _STABLE_DIFFUSION),
)
_RETINANET_SINCE = "v2.0"
"""From then on ``ssd`` is RetinaNet on OpenImages; v5.0 calls it ``retinanet``."""
_BERT_LARGE_BATCH = 8192
_BERT_LARGE_BATCH_TARGET = 0.706

_DATA_SIZES = {
    # Less the last, incomplete batch of 4,096 in MindSpore's logs. One submitter's evaluation lacks an image; others
    # count the batches of an evaluation, or one of 8 ranks.
    "resnet": DataSize(
        train=1_281_167, least_train=1_277_952, evaluate=50_000, least_evaluate=49_999,
        also=frozenset({390, 3_125, 160_000, 6_400}), source="ImageNet-1k, as the submitted logs have it",
    ),
    "ssd": DataSize(train=117_266, evaluate=4_952, source="COCO 2017 with labels, as submitted logs have it"),
    "retinanet": DataSize(
        train=None, least_train=4_571 * 256, in_batches=True, evaluate=None,
        source="OpenImages with 264 classes, as submitted logs have it",
    ),
    "gnmt": DataSize(train=3_442_299, evaluate=3_003, source="WMT16 en-de, newstest2014"),
    "transformer": DataSize(train=None, evaluate=3_003, source="WMT en-de, newstest2014"),
    # train_samples of BERT counts the samples trained.
    "bert": DataSize(train=None, evaluate=10_000, source="Wikipedia"),
    # Some logs of DLRM count the samples that were trained, too.
    "dlrm": DataSize(
        train=3_772_348_416, least_train=1_782_798_336, evaluate=89_137_318, source="Criteo 1 TB",
    ),
    "ncf": DataSize(train=19_861_770, evaluate=138_493, source="MovieLens-20M, as NVIDIA's v0.5 logs have it"),
    # Mask R-CNN: train_samples holds iterations in some submitted logs (training_results_v0.7, issue 3).
    "maskrcnn": DataSize(train=None, evaluate=None, source="COCO 2017"),
}  # fmt: skip


def canonical(name: str | None) -> str | None:
    """Return the benchmark's name as Encore writes it, or None where the name is no benchmark of any round."""
    if name is None:
        return None
    lowered = name.strip().lower()
    lowered = _ALIASES.get(lowered, lowered)
    return lowered if lowered in _RUNS or lowered == "ncf" or is_hpc(lowered) else None


def is_hpc(benchmark: str | None) -> bool:
    """Return whether the benchmark is one of MLPerf HPC, not of MLPerf Training."""
    return benchmark in _HPC


def rounds_of(benchmark: str) -> frozenset[str]:
    """Return the rounds that had the benchmark."""
    found: set[str] = set()
    for name, first, last, _ in _TARGETS:
        if name == benchmark:
            found.update(ROUNDS[ROUNDS.index(first) : ROUNDS.index(last) + 1])
    return frozenset(found)


def targets_of(round_: str, benchmark: str, global_batch: float | None = None) -> tuple[Target, ...]:
    """Return the targets of a benchmark in a round; BERT's of v0.7 depends on the global batch."""
    if (round_, benchmark) == ("v0.7", "bert") and global_batch is not None and global_batch >= _BERT_LARGE_BATCH:
        return _one(_BERT_LARGE_BATCH_TARGET, "masked LM accuracy")
    position, slack = ROUNDS.index(round_), round_ in _WITH_SLACK
    for name, first, last, targets in _TARGETS:
        if name == benchmark and ROUNDS.index(first) <= position <= ROUNDS.index(last):
            return tuple(replace(each, slack=each.value * _FLOAT32) for each in targets) if slack else targets
    return ()


def rule_for(round_: str | None, benchmark: str | None, global_batch: float | None = None) -> Rule | None:
    """Return what the round asks of the benchmark, or None where the round did not have it."""
    if round_ not in ROUNDS or benchmark is None or round_ not in rounds_of(benchmark):
        return None
    targets = targets_of(round_, benchmark, global_batch)
    if benchmark == "ncf":
        return Rule(round=round_, benchmark=benchmark, runs=100, targets=targets, may_miss=50, first_converging=50)
    return Rule(
        round=round_,
        benchmark=benchmark,
        runs=_RUNS[benchmark],
        targets=targets,
        # result_summarizer of mlperf-logging: max_dropped_scores = 4 for unet3d, else 1.
        dropped_each_side=4 if benchmark == "unet3d" else 1,
        # The rules name the non-converging run from v0.7 on; a v0.6 set with one was accepted too.
        may_miss=0 if round_ == "v0.5" else 4 if benchmark == "unet3d" else 1,
    )


def data_size(benchmark: str | None, round_: str | None = None) -> DataSize | None:
    """Return sample counts of the benchmark's real data set, where the submitted logs agree on them."""
    if benchmark == "ssd" and round_ in ROUNDS[ROUNDS.index(_RETINANET_SINCE) :]:
        benchmark = "retinanet"
    return _DATA_SIZES.get(benchmark or "")
