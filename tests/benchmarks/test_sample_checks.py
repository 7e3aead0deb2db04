"""Common mistakes in prepared data sets, made in copies of the toy sets, and their reports."""

import importlib
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import manifest, prepare, recordio, sample_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.progress import Progress
from benchmarks.dlrm import blocks
from benchmarks.language.vocabulary import SPECIAL
from encore.errors import EncoreError
from tests import preparing
from tests.trainings import resolved

Toy = Callable[[str], Path]


def update(folder: Path, **counts: int) -> None:
    # Write the manifest of the changed files, as a preparation with the mistake would
    facts = json.loads((folder / "dataset.json").read_text())
    for name, split in facts["splits"].items():
        split["files"] = [manifest.describe_file(folder / file["name"]) for file in split["files"]]
        split["count"] = counts.get(name, split["count"])
    manifest.write(facts, folder)


# -- mistakes -------------------------------------------------------------------------------------------------


def array(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    path = folder / f"{name}.npy"
    write_array(path, change(np.load(path)))


def ragged(folder: Path, part: str, order: Callable[[int], np.ndarray], *groups: tuple[str, ...]) -> None:
    # Reorders or repeats the samples of a part; each group starts with the name of the offsets
    for offsets_name, *names in groups:
        offsets = np.load(folder / f"{part}_{offsets_name}.npy")
        indices = order(len(offsets) - 1)
        places = np.concatenate([np.arange(*offsets[index : index + 2]) for index in indices])
        for name in names:
            array(folder, f"{part}_{name}", lambda values: values[places])  # noqa: B023
        array(folder, f"{part}_{offsets_name}", lambda all: np.append(0, np.cumsum(np.diff(all)[indices])))  # noqa: B023
    update(folder)


def quarters(count: int) -> np.ndarray:
    # Order of a set with four equal shards
    return np.arange(count) % (-(-count // 4))


def rolled(count: int) -> np.ndarray:
    return np.roll(np.arange(count), 1)


def shuffled(count: int) -> np.ndarray:
    return np.random.RandomState(3).permutation(count)


def shuffle_lines(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    words = [line for line in lines if line not in SPECIAL]
    shuffled_words = iter(random.Random(3).sample(words, len(words)))
    path.write_text("".join((line if line in SPECIAL else next(shuffled_words)) + "\n" for line in lines), "utf-8")
    update(path.parent)


def images(
    folder: Path,
    split: str,
    order: Callable[[np.ndarray], np.ndarray] = lambda labels: np.arange(len(labels)),
    label: Callable[[int], int] = int,
    source: str = "",
    content: Callable[[int, bytes], bytes] = lambda number, image: image,
) -> None:
    rec = folder / f"{source or split}.rec"
    with rec.open("rb") as file:
        index = [*recordio.read_index(rec.with_suffix(".idx"))]
        records = [recordio.unpack(recordio.read_record(file, offset)) for _, offset in index]
    frames = [
        recordio.frame(recordio.pack(label(int(records[number][0])), key, content(key, records[number][1])))
        for key, number in enumerate(order(np.array([label for label, _ in records])))
    ]
    starts = [0, *itertools.accumulate(map(len, frames[:-1]))]
    lines = [recordio.index_line(key, start) for key, start in enumerate(starts)]
    preparing.write_files(folder, {f"{split}.rec": b"".join(frames), f"{split}.idx": lines})
    update(folder)


def clicks(folder: Path, change: Callable[[np.ndarray], np.ndarray], split: str = "train", source: str = "") -> None:
    # Changes the rows of a split, read from the file of ``source``
    count = manifest.read(folder)["splits"][split]["count"]
    stored = np.fromfile(folder / f"{source or split}.bin", np.int32).reshape(-1, blocks.COLUMNS, blocks.BLOCK_ROWS)
    padded = np.zeros((-(-count // blocks.BLOCK_ROWS) * blocks.BLOCK_ROWS, blocks.COLUMNS), np.int32)
    padded[:count] = change(stored.transpose(0, 2, 1).reshape(-1, blocks.COLUMNS)[:count].copy())
    padded.reshape(-1, blocks.BLOCK_ROWS, blocks.COLUMNS).transpose(0, 2, 1).tofile(folder / f"{split}.bin")


def column(number: int, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: np.concatenate((rows[:, :number], change(rows[:, [number]]), rows[:, number + 1 :]), axis=1)


def put_training_items_into_test(folder: Path) -> None:
    # The test item of each user is in the training data
    users, items = (np.load(folder / f"train_{name}.npy") for name in ("users", "items"))
    array(folder, "test_items", lambda test: items[np.searchsorted(users, np.arange(len(test)))])


PAIRS = (("source_offsets", "source"), ("target_offsets", "target"))
MASKED = (("offsets", "tokens"), ("masked_offsets", "masked_places", "masked_labels"))
# Benchmark and mistake: the function that makes it, and a part of the report
MISTAKES: dict[tuple[str, str], tuple[Callable[[Path], object], str]] = {
    ("resnet", "all shards equal"): (
        lambda f: images(f, "train", lambda labels: quarters(len(labels))),
        "train: a part is repeated: from sample 375 on come those from 0 on",
    ),
    ("resnet", "every image twice"): (
        lambda f: images(f, "train", lambda labels: np.random.RandomState(3).permutation(np.arange(len(labels)) % 750)),
        "train: 750 of 1,500 samples repeat"
    ),
    ("resnet", "empty images"): (
        lambda f: images(f, "val", content=lambda number, image: image if number % 9 else bytes(len(image))),
        "val: 33 of 297 samples are empty, the first is 0",
    ),
    ("resnet", "sorted labels"): (
        lambda f: images(f, "train", lambda labels: np.argsort(labels, kind="stable")), "train: labels are sorted"
    ),
    ("resnet", "missing classes"): (
        lambda f: images(f, "val", label=lambda label: label // 2), "val: 5 of 10 classes have no sample"
    ),
    ("resnet", "labels from 1"): (
        lambda f: images(f, "train", label=lambda label: label + 1), "train: labels from 1 to 10"
    ),
    ("resnet", "evaluated on training"): (
        lambda f: images(f, "val", lambda labels: np.arange(297), source="train"), "val: about 100% of the evaluation"
    ),
    ("dlrm", "all shards equal"): (
        lambda f: clicks(f, lambda rows: rows[quarters(len(rows))]), "train: a part is repeated"
    ),
    ("dlrm", "empty rows"): (
        lambda f: clicks(f, lambda rows: rows * (np.arange(len(rows)) % 8 > 0)[:, None]), "samples are empty"
    ),
    ("dlrm", "labels of other rows"): (
        lambda f: clicks(f, column(0, lambda labels: np.roll(labels, 1, 0))),
        "train: no category correlates with the labels",
    ),
    ("dlrm", "sorted labels"): (
        lambda f: clicks(f, lambda rows: rows[np.argsort(rows[:, 0], kind="stable")]), "train: labels are sorted"
    ),
    ("dlrm", "other tables"): (
        lambda f: clicks(f, column(15, lambda rows: rows + 10**6)), "train: rows of table 1 from "
    ),
    ("dlrm", "labels of three classes"): (
        lambda f: clicks(f, column(0, lambda labels: labels * 2)), "train: labels from 0 to 2"
    ),
    ("dlrm", "evaluated on training"): (
        lambda f: clicks(f, lambda rows: rows, "val", source="train"),
        "of the evaluation samples are in the training data",
    ),
    ("ncf", "a part twice"): (
        lambda f: [array(f, f"train_{name}", lambda all: all[quarters(len(all))]) for name in ("users", "items")],
        "train: a part is repeated",
    ),
    ("ncf", "shuffled pairs"): (
        lambda f: [array(f, f"train_{name}", lambda all: all[shuffled(len(all))]) for name in ("users", "items")],
        "train_users.npy is not sorted",
    ),
    ("ncf", "negatives of other users"): (
        lambda f: array(f, "test_negatives", lambda all: np.roll(all, 1, 0)), "users have negatives that they rated"
    ),
    ("ncf", "other items"): (lambda f: array(f, "train_items", lambda all: all + 9), "items: up to 1,2"),
    ("ncf", "evaluated on training"): (put_training_items_into_test, "test: about 100% of the evaluation samples"),
    ("gnmt", "all shards equal"): (
        lambda f: ragged(f, "train", quarters, *PAIRS), "train: a part is repeated: from sample 2,000 on"
    ),
    ("gnmt", "sides not aligned"): (
        lambda f: ragged(f, "train", shuffled, PAIRS[1]), "train: the lengths of both sides have a correlation of"
    ),
    ("gnmt", "test in another order"): (
        lambda f: ragged(f, "test", rolled, *PAIRS), "lines of test_target are not what its tokens say"
    ),
    ("gnmt", "another vocabulary"): (
        lambda f: shuffle_lines(f / "vocabulary.txt"), "lines of test_source are not what its tokens say"
    ),
    ("ssd", "all shards equal"): (
        lambda f: array(f, "train_checksums", lambda all: all[quarters(len(all))]), "train: a part is repeated"
    ),
    ("ssd", "objects of other images"): (
        lambda f: array(f, "val_sizes", lambda all: all // 2), "images of val have boxes outside of them"
    ),
    ("ssd", "shuffled images"): (
        lambda f: array(f, "val_image_ids", lambda all: all[::-1]), "val: images are not in the order of their ids"
    ),
    ("ssd", "missing categories"): (
        lambda f: array(f, "train_labels", lambda all: (all + 1) // 2), "train: category 6 has no object"
    ),
    ("ssd", "evaluated on training"): (
        lambda f: write_array(f / "val_checksums.npy", np.load(f / "train_checksums.npy")[:120]), "val: about 100%"
    ),
    ("bert", "all shards equal"): (
        lambda f: [
            ragged(f, "train", quarters, *MASKED),
            *[array(f, f"train_{name}", lambda all: all[quarters(len(all))]) for name in ("second", "next")],
        ],
        "train: a part is repeated",
    ),
    ("bert", "masks of other samples"): (
        lambda f: ragged(f, "test", rolled, MASKED[1]), "test: [MASK] is at "
    ),
    ("bert", "another vocabulary"): (
        lambda f: shuffle_lines(f / "vocabulary.txt"),
        "sequences of train are other tokens when their text is tokenized again",
    ),
    ("bert", "no random second text"): (
        lambda f: array(f, "train_next", lambda all: all * 0), "train: 1 of 2 classes have no sample, the first is 1"
    ),
    ("bert-squad", "answers of other windows"): (
        lambda f: [array(f, f"train_{name}", lambda all: np.roll(all, 1)) for name in ("start", "end")],
        "windows of train have an answer outside of the paragraph",
    ),
    ("bert-squad", "questions in another order"): (
        lambda f: array(f, "test_question", lambda all: all[::-1]), "test: windows are not in the order"
    ),
    ("bert-squad", "paragraphs of other questions"): (
        lambda f: array(f, "test_question", lambda all: np.sort(np.roll(all, len(all) // 2)).clip(0, 9)),
        "windows of test are not the text of their paragraph",
    ),
    ("bert-squad", "another vocabulary"): (
        lambda f: shuffle_lines(f / "vocabulary.txt"), "windows of test are not the text of their paragraph"
    ),
    ("llama31-8b", "tokens in another order"): (
        lambda f: [np.fromfile(f / "train.bin", "<u2")[::-1].tofile(f / "train.bin"), update(f)],
        "documents of train are other tokens when they are decoded and encoded again",
    ),
    ("llama2-70b-lora", "all shards equal"): (
        lambda f: [array(f, f"train_{name}", lambda all: all[quarters(len(all))]) for name in ("tokens", "counts")],
        "train: a part is repeated",
    ),
    ("llama2-70b-lora", "evaluated on training"): (
        lambda f: array(f, "test_tokens", lambda all: np.load(f / "train_tokens.npy")[: len(all)]),
        "test: about 100% of the evaluation",
    ),
    ("llama2-70b-lora", "another vocabulary"): (
        lambda f: array(f, "train_tokens", lambda all: all + 10**6), "train: tokens up to"
    ),
    ("llama2-70b-lora", "without summaries"): (
        lambda f: array(f, "test_counts", np.zeros_like), "samples of test without a token in the loss"
    ),
    ("minigo", "moves of other games"): (
        lambda f: array(f, "starts", lambda all: np.concatenate(([0], all[1:-1] + 9, all[-1:]))),
        "games have moves that are illegal",
    ),
    ("minigo", "one winner"): (lambda f: array(f, "outcomes", lambda all: np.abs(all)), "classes have no sample"),
    ("minigo", "sorted outcomes"): (lambda f: array(f, "outcomes", np.sort), "train: labels are sorted"),
}  # fmt: skip


def report(benchmark: str, folder: Path) -> str:
    dataset = importlib.import_module(f"benchmarks.{benchmark.replace('-', '_')}.prepare").DATA_SET
    problems = prepare.sample_problems(dataset, folder, Progress(as_json=True))
    assert all(problem.expected and str(folder) in problem.hint for problem in problems)
    return "\n".join(problem.found for problem in problems)


# Fewer samples of large sets, for speed, and repetitions in small sets too
SMALL = {"LOOKED_AT": 8000, "LEAST": 100}


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, SMALL], ids=["all", "small"])
@pytest.mark.parametrize(
    "benchmark",
    ("resnet", "dlrm", "ncf", "gnmt", "ssd", "bert", "bert-squad", "llama31-8b", "llama2-70b-lora", "minigo"),
)
def test_toy_sets_have_no_mistakes(
    benchmark: str, limits: dict[str, int], toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(sample_checks, name, limit)
    assert report(benchmark, toy(benchmark)) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "mistake"), MISTAKES)
def test_mistake_is_reported(
    benchmark: str, mistake: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in SMALL.items():
        monkeypatch.setattr(sample_checks, name, limit)
    (edit, message), folder = MISTAKES[benchmark, mistake], Path(shutil.copytree(toy(benchmark), tmp_path / "copy"))
    edit(folder)
    assert message in report(benchmark, folder)


# -- large sets --------------------------------------------------------------------------------------------------


def numbers(count: int, content: Callable[[np.ndarray], np.ndarray]) -> sample_checks.Part:
    # Samples that are computed from their indices when they are read
    return sample_checks.Part(count, lambda indices: [b"%d" % number for number in content(indices).tolist()])


def scattered(number: np.ndarray, limit: int) -> np.ndarray:
    # Numbers below ``limit`` in random order (SplitMix64)
    mixed = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(limit)


@pytest.mark.parametrize(
    ("count", "content", "message"),
    [
        (4_195_197_692, lambda n: n, ""),
        (100_000_000, lambda n: scattered(n, 100_000_000), "repeat"),  # Once on average, in any order
        (4_195_197_692, lambda n: scattered(n, 4_195_197_692 // 24), "repeat"),
        (20_000_000, lambda n: n % 10_000_000, "a part is repeated"),
        (20_000_000, lambda n: n - 5_000_000 * (n >= 19_000_000), "a part is repeated"),  # A twentieth, at the end
    ],
)
def test_mistakes_in_large_sets_are_found_in_a_sample(
    count: int, content: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    sizes = []
    train = numbers(count, lambda indices: sizes.append(len(indices)) or content(indices))  # type: ignore[func-returns-value]
    view = sample_checks.View({"train": train, "test": numbers(9, lambda n: -1 - n)})
    problems: list[Any] = sample_checks.find(view, Path("set"))
    assert message in " ".join(problem.found for problem in problems) and bool(problems) == bool(message)
    assert sum(sizes) <= 3 * sample_checks.LOOKED_AT


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gnmt", "beta1=1.0", "beta1 and beta2 must be in 0..1"),
        ("gnmt", "layers=1", "layers"),
        ("gnmt", "loss_scale=10000.0", "loss_scale must not be above loss_scale_limit"),
        ("gpt-oss-20b", "chosen_experts=4; experts=2", "chosen_experts=4 must be at most experts=2"),
        ("gpt-oss-20b", "expert_parallelism=5", "expert_parallelism=5 must divide experts=8"),
        ("gpt-oss-20b", "head_size=63", "a head of 63 values has no pairs"),
        ("gpt-oss-20b", "width=100", "multiples of 8"),
        ("gpt-oss-20b", "window=-1", "window must be at least 0"),
        ("ncf", "beta1=1.0", "beta1 and beta2"),
        ("ncf", "beta2=-0.1", "beta1 and beta2"),
        ("ncf", "factors=0", "factors must be at least 1"),
        ("ncf", "layers=[2, 0]", "at least two values"),
        ("ncf", "layers=[2]", "at least two values"),
        ("ncf", "layers=[3, 2]", "must be even"),
        ("ncf", "optimizer_kernel=apex", "device=cpu has no apex"),
        ("resnet", "dali_crop_hint=-1", "dali_crop_hint must be at least 0"),
        ("resnet", "dali_hw_decoder_load=1.5", "dali_hw_decoder_load must be in 0..1"),
        ("resnet-pytorch", "accumulation_steps=3", "must be a multiple of accumulation_steps=3"),
        ("resnet-pytorch", "bucket_mb=0", "bucket_mb must be at least 1"),
        ("resnet-pytorch", "compile=fast", "default"),
        ("resnet-pytorch", "cuda_graph=true", "cuda_graph needs device=gpu"),
        ("resnet-pytorch", "precision=fp16", "set precision=fp32 or precision=bf16"),
        ("resnet-tensorflow", "gradient_groups=-1", "gradient_groups must be at least 0"),
        ("resnet-tensorflow", "layout=NCHW", "one of NHWC"),
        ("resnet-tensorflow", "precision=tf32", "set precision=fp32 or precision=bf16"),
        ("ssd", "blocks=[3, 4]", "blocks needs three numbers"),
        ("ssd", "box_scales=[0.3, 0.2, 0.4, 0.6, 0.8]", "box_scales must be positive"),
        ("ssd", "cuda_graph=true", "cuda_graph needs device=gpu"),
        ("ssd", "eval_steps=[10]; concurrent_evaluation=true", "eval_steps needs concurrent_evaluation=false"),
        ("ssd", "nms_threshold=2.0", "nms_threshold must be in 0..1"),
        ("ssd", "optimizer_kernel=apex", "device=cpu has no apex"),
        ("ssd", "precision=tf32", "set precision=fp32 or precision=bf16"),
        ("transformer", "batch_size=39", "must hold a pair of max_length=40"),
        ("transformer", "compile=true", "set compile=false"),
        ("transformer", "heads=3", "width=64 must be a multiple of 2 * heads=6"),
        ("transformer", "precision=tf32", "has no tf32"),
        ("transformer", "relu_dropout=1.0", "relu_dropout must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_are_rejected(name: str, settings: str, message: str) -> None:
    with pytest.raises(EncoreError, match=re.escape(message)) as caught:
        resolved(name, "cpu", None, 1, *settings.split("; "), nodes=1)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gnmt", "layers", 2),
        ("gpt-oss-20b", "chosen_experts", 8),
        ("gpt-oss-20b", "window", 0),
        ("ncf", "beta1", 0.0),
        ("ncf", "beta2", 0.0),
        ("ncf", "factors", 1),
        ("ncf", "layers", [2, 1]),
        ("resnet", "dali_crop_hint", 0),
        ("resnet", "dali_hw_decoder_load", 0.0),
        ("resnet", "dali_hw_decoder_load", 1.0),
        ("resnet-pytorch", "bucket_mb", 1),
        ("resnet-tensorflow", "gradient_groups", 0),
        ("ssd", "nms_threshold", 1.0),
        ("transformer", "batch_size", 40),
        ("transformer", "relu_dropout", 0.0),
    ],
)
def test_settings_at_their_limits_are_accepted(name: str, key: str, value: object) -> None:
    assert json.dumps(resolved(name, "cpu", None, 1, f"{key}={value}", nodes=1).plain()[key]) == json.dumps(value)
