"""Records written by trainings and preparations; the host generates its JSON schemas from these types.

Standard library only: the host imports this module. Fields with a default are omitted if empty.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Dict, List, Literal, Optional, Union


def plain(record: Any) -> Dict[str, Any]:
    """Return the fields of a record as written, in order."""
    needed = {
        record_field.name
        for record_field in fields(record)
        if record_field.default is MISSING and record_field.default_factory is MISSING
    }
    return {name: value for name, value in vars(record).items() if value or name in needed}


# -- metrics.jsonl: every record also has ``kind`` and ``time`` ----------------------------------------


@dataclass(frozen=True)
class Start:
    """Start or resumption of a training."""

    ranks: int
    global_batch_size: int
    batch_unit: str  # unit of the global batch, such as samples or tokens
    epochs: int
    steps_per_epoch: int
    targets: Dict[str, float]  # by the name of the quality
    resumed_step: int  # 0: not resumed
    damaged: Dict[str, str]  # newer checkpoints that were skipped, with their damage, by name
    environment: Dict[str, str]  # library variables of rank 0
    choices: Dict[str, Any]  # resolved "auto" settings by configuration key, and `tf32` on GPUs; as in run.json
    evidence: Dict[str, Any]  # numerical precision and parallelism; as in run.json
    flops_per_sample: Optional[float]  # model FLOPs of training on one `batch_unit`; null: no formula
    gemm_precision: str  # numerical precision of the GEMMs
    startup: Dict[str, Dict[str, float]]  # `seconds` of each startup phase, and its `budget`
    kind: Literal["start"] = "start"


@dataclass(frozen=True)
class Step:
    """Every `log_interval` steps, two steps late: reading a loss immediately would synchronize with the device."""

    epoch: int  # from 1
    step: int  # from 1 over the run; BERT in fp16 repeats the numbers of steps that overflowed
    loss: float  # mean over the ranks and over the steps since the last record
    learning_rate: float
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class Epoch:
    """Throughput of a part of the training."""

    epoch: int  # from 1
    samples_per_second: float  # training only
    input_share: float  # fraction of the time in which the device of rank 0 waited for data
    stages: Dict[str, float] = field(default_factory=dict)  # seconds of each stage, if the training times them
    kind: Literal["epoch"] = "epoch"


@dataclass(frozen=True)
class Checkpoint:
    """A written checkpoint; `log_lengths` in the checkpoint exclude this record."""

    step: int
    seconds: float  # training time lost
    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True)
class CheckpointWritten:
    """End of an asynchronous save."""

    step: int
    seconds: float  # of writing it
    kind: Literal["checkpoint_written"] = "checkpoint_written"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation; benchmarks add further figures, such as `ndcg` (NCF) and `log_loss` (DLRM)."""

    __pydantic_config__ = {"extra": "allow"}  # noqa: RUF012  (the host's schema allows these figures)

    epoch: int  # from 1
    qualities: Dict[str, float]  # by name, as fractions of 1; BLEU 0 to 100
    seconds: float
    step: int = 0  # training steps before it; 0 in streams of older versions
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
    """Steps of a rank in about a minute; the first windows are shorter, from 5 seconds."""

    time: float  # end of the window, Unix seconds
    node: str
    local_rank: int  # on GPUs, the GPU
    step: int  # the last step, from 1
    steps: int  # steps of the window
    window: float  # seconds
    median: float  # step time in seconds
    p99: float  # step time in seconds
    waiting: Optional[float]  # fraction of the training time in which the rank waited for other ranks; null on GPUs
    input: float  # fraction of the time in which the device waited for data
    cpu: float  # CPU seconds of its threads
    delayed: float  # seconds in which its threads were runnable without a core


# -- dataset.json --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSplit:
    """A split; writers add fields such as `unlisted_bytes`, the size of files that are too many to list."""

    __pydantic_config__ = {"extra": "allow"}  # noqa: RUF012  (the host's schema allows what writers add)

    count: int  # samples
    files: List[DataFile]


@dataclass(frozen=True)
class DataSet:
    """The manifest of a data set, written last: a folder without it is incomplete."""

    schema: int  # version of this format
    id: str  # sha256 of the content: equal data have equal ids, independent of their path
    benchmark: str
    name: str
    classes: List[str]  # names in label order; empty without labels
    splits: Dict[str, DataSplit]
    facts: Dict[str, Any]  # sizes that the training needs, such as users and items; part of the id
    how: Dict[str, Any]  # no part of the id: `source` (hash of the raw data's listing), options, versions
    sha256: str  # of all the other fields: a changed manifest is noticed
    shared_with: List[str] = field(default_factory=list)  # all benchmarks that read it, where it is more than one
