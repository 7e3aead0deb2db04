"""What a training and a preparation write for others to read; the host's schemas are made from these types.

Standard library only: the host loads this file. A field with a default is left out where it has nothing to say.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Dict, List, Literal, Optional, Union


def plain(record: Any) -> Dict[str, Any]:
    """Return the fields of a record as they are written, in their order."""
    needed = {
        record_field.name
        for record_field in fields(record)
        if record_field.default is MISSING and record_field.default_factory is MISSING
    }
    return {name: value for name, value in vars(record).items() if value or name in needed}


# -- metrics.jsonl: every record also has ``kind`` and ``time`` ----------------------------------------


@dataclass(frozen=True)
class Start:
    """The start of a training, or of its resumption."""

    ranks: int
    global_batch_size: int
    batch_unit: str  # what the global batch counts: samples or tokens, for example
    epochs: int
    steps_per_epoch: int
    targets: Dict[str, float]  # by the name of the quality
    resumed_step: int  # 0: not resumed
    damaged: Dict[str, str]  # newer checkpoints that the resume passed over, by name, with what is wrong with each
    environment: Dict[str, str]  # of rank 0: the variables that its libraries read
    choices: Dict[str, Any]  # what "auto" became, by the configuration's keys, and `tf32` on GPUs; as in run.json
    evidence: Dict[str, Any]  # what it computes and sends in, and how it is split; as in run.json
    flops_per_sample: Optional[float]  # model FLOPs of training on one `batch_unit`; null: no formula
    gemm_precision: str  # numerical precision of its GEMMs
    startup: Dict[str, Dict[str, float]]  # `seconds` of the parts of the start, and the `budget` of each
    kind: Literal["start"] = "start"


@dataclass(frozen=True)
class Step:
    """Every `log_interval` steps, two steps late: reading each loss immediately would synchronize with the device."""

    epoch: int  # from 1
    step: int  # from 1 over the whole run; BERT in fp16 repeats numbers of steps that overflowed
    loss: float  # mean over the ranks and over the steps since the last record
    learning_rate: float
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class Epoch:
    """The speed of a part of the training, at its end."""

    epoch: int  # from 1
    samples_per_second: float  # training only
    input_share: float  # share of the time in which the device of rank 0 was idle: its next batch was not there
    stages: Dict[str, float] = field(default_factory=dict)  # seconds of each stage, where the training times them
    kind: Literal["epoch"] = "epoch"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was written; the one that a run was resumed from holds the length of the stream without it."""

    step: int
    seconds: float  # in which training stood still
    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True)
class CheckpointWritten:
    """The end of a save that went on behind the training, from a copy."""

    step: int
    seconds: float  # of writing it
    kind: Literal["checkpoint_written"] = "checkpoint_written"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation; benchmarks add figures of their own, such as `ndcg` (NCF) and `log_loss` (DLRM)."""

    __pydantic_config__ = {"extra": "allow"}  # noqa: RUF012  (the host's schema allows these figures)

    epoch: int  # from 1
    qualities: Dict[str, float]  # by name, each a share of 1; BLEU 0 to 100
    seconds: float
    kind: Literal["eval"] = "eval"


@dataclass(frozen=True)
class End:
    """The last record; missing if the run failed."""

    outcome: Literal["reached", "not_reached", "interrupted"]
    kind: Literal["end"] = "end"


Record = Union[Start, Step, Epoch, Checkpoint, CheckpointWritten, Evaluation, End]


# -- steps/rank_N.jsonl --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepWindow:
    """The steps of a rank in about a minute; the first lines come after 5 seconds and more."""

    time: float  # end of the window, Unix seconds
    node: str
    local_rank: int  # on GPUs, its GPU
    step: int  # the last step, from 1
    steps: int  # steps of the window
    window: float  # its seconds
    median: float  # seconds of a step
    p99: float  # seconds of a step
    waiting: Optional[float]  # share of the training time in which the rank waited for other ranks; null on GPUs
    input: float  # share of the time in which its device waited for its next batch
    cpu: float  # seconds that its threads ran
    delayed: float  # seconds that its threads were ready and had no core


# -- dataset.json --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSplit:
    """A split; writers add what they need, such as `unlisted_bytes`, the size of files that are too many to list."""

    __pydantic_config__ = {"extra": "allow"}  # noqa: RUF012  (the host's schema allows what writers add)

    count: int  # samples
    files: List[DataFile]


@dataclass(frozen=True)
class DataSet:
    """The manifest of a data set, written last: a folder without it is half-written."""

    schema: int  # version of this format
    id: str  # sha256 of the content alone: equal data have equal ids, wherever they are
    benchmark: str
    name: str
    classes: List[str]  # names in the order of their labels; empty where samples have none
    splits: Dict[str, DataSplit]
    facts: Dict[str, Any]  # sizes that the training needs, such as users and items; part of the id
    how: Dict[str, Any]  # no part of the id: `source` (hash of the raw data's listing), options, versions
    sha256: str  # of all the other fields: a changed manifest is noticed
    shared_with: List[str] = field(default_factory=list)  # all benchmarks that read it, where it is more than one
