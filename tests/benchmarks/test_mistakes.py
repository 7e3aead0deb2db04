"""Classical mistakes of a preparation: each is made on the toy set of a benchmark, and named."""

import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.data import mistakes, passport, prepare, recordio
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.progress import Progress
from benchmarks.dlrm import blocks
from benchmarks.language.vocabulary import SPECIAL
from benchmarks.llama import megatron
from tests import preparing

Toy = Callable[[str], Path]
Edit = Callable[[Path], object]
TOYS = ("resnet", "dlrm", "ncf", "gnmt", "ssd", "bert", "bert-squad", "llama31-8b", "llama2-70b-lora", "minigo")


def declared(benchmark: str) -> prepare.DataSet:
    found: prepare.DataSet = importlib.import_module(f"benchmarks.{benchmark.replace('-', '_')}.prepare").DATA_SET
    return found


def update(folder: Path, **counts: int) -> None:
    """Write the sizes that the files have now into the manifest, as a preparation that made the mistake would have."""
    path = folder / "dataset.json"
    facts = json.loads(path.read_text())
    for name, split in facts["splits"].items():
        split["files"] = [{**file, "bytes": (folder / file["name"]).stat().st_size} for file in split["files"]]
        split["count"] = counts.get(name, split["count"])
    path.write_text(json.dumps(facts))


# -- ways to go wrong ------------------------------------------------------------------------------------------


def array(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    path = folder / f"{name}.npy"
    write_array(path, change(np.load(path)))


def ragged(folder: Path, part: str, order: Callable[[int], np.ndarray], *groups: tuple[str, ...]) -> None:
    """Put the samples of a part into another order, or some of them twice; each group has its offsets first."""
    for offsets_name, *names in groups:
        offsets = np.load(folder / f"{part}_{offsets_name}.npy")
        chosen = order(len(offsets) - 1)
        for name in names:
            values = np.load(folder / f"{part}_{name}.npy")
            write_array(
                folder / f"{part}_{name}.npy",
                np.concatenate([values[offsets[index] : offsets[index + 1]] for index in chosen]),
            )
        write_array(folder / f"{part}_{offsets_name}.npy", np.concatenate(([0], np.cumsum(np.diff(offsets)[chosen]))))
    update(folder)


def quarters(count: int) -> np.ndarray:
    """Return the order of a set whose four shards are the same."""
    return np.arange(count) % (-(-count // 4))


def halves(count: int) -> np.ndarray:
    """Return the order of a set in which every sample is twice, shuffled."""
    return np.random.RandomState(3).permutation(np.arange(count) % (-(-count // 2)))


def behind(count: int) -> np.ndarray:
    return np.roll(np.arange(count), 1)


def shuffled(count: int) -> np.ndarray:
    return np.random.RandomState(3).permutation(count)


def shuffle_lines(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if line not in SPECIAL]
    random.Random(3).shuffle(others)
    ordered = iter(others)
    path.write_text("\n".join(line if line in SPECIAL else next(ordered) for line in lines) + "\n", encoding="utf-8")
    update(path.parent)


def images(
    folder: Path,
    split: str,
    order: Callable[[np.ndarray], np.ndarray] = lambda labels: np.arange(len(labels)),
    label: Callable[[int], int] = int,
    of: str = "",
    content: Callable[[int, bytes], bytes] = lambda number, image: image,
) -> None:
    source = folder / f"{of or split}.rec"
    offsets = [offset for _, offset in recordio.read_index(source.with_suffix(".idx"))]
    with source.open("rb") as file:
        records = [recordio.unpack(recordio.read_record(file, offset)) for offset in offsets]
    index, written = "", b""
    for key, chosen in enumerate(order(np.array([label for label, _ in records]))):
        index += recordio.index_line(key, len(written))
        written += recordio.frame(recordio.pack(label(int(records[chosen][0])), key, content(key, records[chosen][1])))
    (folder / f"{split}.rec").write_bytes(written)
    (folder / f"{split}.idx").write_text(index)
    update(folder)


def clicks(folder: Path, change: Callable[[np.ndarray], np.ndarray], split: str = "train", of: str = "") -> None:
    """Change the rows [rows, columns] of a split, or those of another one in its place."""
    count = passport.read(folder)["splits"][split]["count"]
    found = np.fromfile(folder / f"{of or split}.bin", np.int32).reshape(-1, blocks.COLUMNS, blocks.BLOCK_ROWS)
    rows = change(found.transpose(0, 2, 1).reshape(-1, blocks.COLUMNS)[:count].copy())
    whole = np.zeros((-(-count // blocks.BLOCK_ROWS) * blocks.BLOCK_ROWS, blocks.COLUMNS), np.int32)
    whole[:count] = rows
    whole.reshape(-1, blocks.BLOCK_ROWS, blocks.COLUMNS).transpose(0, 2, 1).tofile(folder / f"{split}.bin")


def columns(chosen: slice, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    def changed(rows: np.ndarray) -> np.ndarray:
        rows[:, chosen] = change(rows[:, chosen])
        return rows

    return changed


def documents(folder: Path, part: str, order: Callable[[int], np.ndarray], of: str = "") -> None:
    found = megatron.open_documents(folder / (of or part))
    chosen = [np.array(found.read(index, 0, 1 << 30)) for index in order(len(found.lengths))]
    with (folder / f"{part}.idx").open("wb") as file:
        megatron.write_index(file, [len(each) for each in chosen], found.tokens.dtype)
    del found
    np.concatenate(chosen).tofile(folder / f"{part}.bin")
    update(folder, **{part: len(chosen)})


def swap_tokens(folder: Path) -> None:
    """Give the tokenizer's entries to other ids, as another one of the same size has them."""
    path = folder / "tokenizer.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    entries = facts["model"]["vocab"]
    plain = [entry for entry in entries if not entry.startswith("<|")]
    ids = [entries[entry] for entry in plain]
    random.Random(3).shuffle(ids)
    entries.update(zip(plain, ids, strict=True))
    path.write_text(json.dumps(facts), encoding="utf-8")
    update(folder)


def held_out(folder: Path) -> None:
    """Hold out an item that each user trains on."""
    users, items = (np.load(folder / f"train_{name}.npy") for name in ("users", "items"))
    array(folder, "test_items", lambda held: items[np.searchsorted(users, np.arange(len(held)))])


def copy_part(folder: Path, names: tuple[str, ...], count: int, **offsets: str) -> None:
    """Put the first ``count`` training samples into the place of those for evaluation."""
    for name in names:
        of = offsets.get(name)
        most = int(np.load(folder / f"train_{of}.npy")[count]) if of else count
        write_array(folder / f"test_{name}.npy", np.load(folder / f"train_{name}.npy")[:most])
    for of in set(offsets.values()):
        write_array(folder / f"test_{of}.npy", np.load(folder / f"train_{of}.npy")[: count + 1])
    update(folder, test=count)


PAIRS = (("source_offsets", "source"), ("target_offsets", "target"))
MASKED = (("offsets", "tokens"), ("masked_offsets", "masked_places", "masked_labels"))
# The mistake, how it is made, and what is said of it.
MISTAKES: dict[tuple[str, str], tuple[Edit, str]] = {
    ("resnet", "all shards equal"): (
        lambda f: images(f, "train", lambda labels: quarters(len(labels))),
        "train: a part is repeated: from sample 375 on come those from 0 on",
    ),
    ("resnet", "every image twice"): (
        lambda f: images(f, "train", lambda labels: halves(len(labels))), "train: 750 of 1,500 samples repeat"
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
        lambda f: images(f, "val", lambda labels: np.arange(297), of="train"), "val: about 100% of the evaluation"
    ),
    ("dlrm", "all shards equal"): (
        lambda f: clicks(f, lambda rows: rows[quarters(len(rows))]), "train: a part is repeated"
    ),
    ("dlrm", "empty rows"): (
        lambda f: clicks(f, lambda rows: rows * (np.arange(len(rows)) % 8 > 0)[:, None]), "samples are empty"
    ),
    ("dlrm", "labels of other rows"): (
        lambda f: clicks(f, columns(slice(0, 1), lambda labels: np.roll(labels, 1, 0))),
        "train: no category says anything of the labels",
    ),
    ("dlrm", "sorted labels"): (
        lambda f: clicks(f, lambda rows: rows[np.argsort(rows[:, 0], kind="stable")]), "train: labels are sorted"
    ),
    ("dlrm", "other tables"): (
        lambda f: clicks(f, columns(slice(15, 16), lambda rows: rows + 10**6)), "train: rows of table 1 from "
    ),
    ("dlrm", "labels of three classes"): (
        lambda f: clicks(f, columns(slice(0, 1), lambda labels: labels * 2)), "train: labels from 0 to 2"
    ),
    ("dlrm", "evaluated on training"): (
        lambda f: clicks(f, lambda rows: rows, "val", of="train"), "of the evaluation samples are in the training data"
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
    ("ncf", "evaluated on training"): (held_out, "test: about 100% of the evaluation samples"),
    ("gnmt", "all shards equal"): (
        lambda f: ragged(f, "train", quarters, *PAIRS), "train: a part is repeated: from sample 2,000 on"
    ),
    ("gnmt", "sides not aligned"): (
        lambda f: ragged(f, "train", shuffled, PAIRS[1]), "train: the lengths of both sides have a correlation of"
    ),
    ("gnmt", "test in another order"): (
        lambda f: ragged(f, "test", behind, *PAIRS), "lines of test_target are not what its tokens say"
    ),
    ("gnmt", "another vocabulary"): (
        lambda f: shuffle_lines(f / "vocabulary.txt"), "lines of test_source are not what its tokens say"
    ),
    ("gnmt", "evaluated on training"): (
        lambda f: copy_part(
            f, ("source", "target"), 400, source="source_offsets", target="target_offsets"
        ), "test: about 100% of the evaluation samples",
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
        lambda f: ragged(f, "test", behind, MASKED[1]), "test: [MASK] is at "
    ),
    ("bert", "another vocabulary"): (
        lambda f: shuffle_lines(f / "vocabulary.txt"),
        "sequences of train are other tokens when their text is tokenized again",
    ),
    ("bert", "no random second text"): (
        lambda f: array(f, "train_next", lambda all: all * 0), "train: 1 of 2 classes have no sample, the first is 1"
    ),
    ("bert", "evaluated on training"): (
        lambda f: copy_part(
            f, ("second", "next", "tokens", "masked_places", "masked_labels"), 1000, tokens="offsets",
            masked_places="masked_offsets", masked_labels="masked_offsets",
        ), "test: about 100% of the evaluation samples",
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
    ("llama31-8b", "all shards equal"): (
        lambda f: documents(f, "train", lambda count: np.tile(quarters(count), 4)), "train: a part is repeated"
    ),
    ("llama31-8b", "another tokenizer"): (
        swap_tokens, "documents of train are other tokens when they are decoded and encoded again"
    ),
    ("llama31-8b", "evaluated on training"): (
        lambda f: documents(f, "test", lambda count: np.arange(30), of="train"), "test: about 100% of the evaluation"
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
        lambda f: array(f, "test_counts", np.zeros_like), "samples of test in which no token counts"
    ),
    ("minigo", "moves of other games"): (
        lambda f: array(f, "starts", lambda all: np.concatenate(([0], all[1:-1] + 9, all[-1:]))),
        "games have moves that are illegal",
    ),
    ("minigo", "one winner"): (lambda f: array(f, "outcomes", lambda all: np.abs(all)), "classes have no sample"),
    ("minigo", "sorted outcomes"): (lambda f: array(f, "outcomes", np.sort), "train: labels are sorted"),
}  # fmt: skip


def found(benchmark: str, folder: Path) -> str:
    problems = prepare.mistaken(declared(benchmark), folder, Progress(as_json=True))
    assert all(each.expected and str(folder) in each.hint for each in problems)
    return "\n".join(each.found for each in problems)


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", TOYS)
def test_each_mistake_is_named_and_the_healthy_set_has_none(
    benchmark: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = toy(benchmark)
    assert found(benchmark, healthy) == ""
    # Less of the larger sets, which takes less time; repetitions in the smaller ones too.
    monkeypatch.setattr(mistakes, "LOOKED_AT", 8000)
    monkeypatch.setattr(mistakes, "LEAST", 100)
    assert found(benchmark, healthy) == ""
    missed = {}
    for (of, mistake), (edit, said) in MISTAKES.items():
        if of == benchmark:
            folder = Path(shutil.copytree(healthy, tmp_path / "copy"))
            edit(folder)
            reported = found(benchmark, folder)
            if said not in reported:
                missed[mistake] = reported
            shutil.rmtree(folder)
    assert not missed
    folder = Path(shutil.copytree(healthy, tmp_path / "copy"))
    cut = folder / passport.files_of(passport.read(folder))[0]["name"]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert f"{cut} has" in " ".join(each.found for each in passport.verify(folder, quick=True))


@pytest.mark.slow
def test_verify_reports_what_a_manifest_cannot_tell(toy: Toy, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy("ncf"), tmp_path / "copy"))
    held_out(folder)
    facts = json.loads((folder / "dataset.json").read_text())
    for split in facts["splits"].values():
        split["files"] = [passport.describe_file(folder / file["name"]) for file in split["files"]]
    passport.write(facts, folder)
    for how in ((), ("--quick",)):
        assert "test: about 100% of the evaluation samples" in preparing.refused(
            preparing.run("ncf", "--verify", folder, *how)
        )


# -- large sets --------------------------------------------------------------------------------------------------


def numbers(count: int, of: Callable[[np.ndarray], np.ndarray]) -> mistakes.Part:
    """Return a part of ``count`` samples, each a number, which are worked out when they are read."""
    return mistakes.Part(count, lambda indices: [b"%d" % each for each in of(indices).tolist()])


def scattered(number: np.ndarray, most: int) -> np.ndarray:
    """Return a number below ``most`` for each, without any order (SplitMix64)."""
    mixed = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(most)


@pytest.mark.parametrize(
    ("count", "of", "said"),
    [
        (4_195_197_692, lambda n: n, ""),
        (100_000_000, lambda n: scattered(n, 100_000_000), "repeat"),  # once on average, in any order
        (4_195_197_692, lambda n: scattered(n, 4_195_197_692 // 24), "repeat"),
        (20_000_000, lambda n: n % 10_000_000, "a part is repeated"),
        (20_000_000, lambda n: n - 5_000_000 * (n >= 19_000_000), "a part is repeated"),  # a twentieth, at the end
    ],
)
def test_what_is_found_in_a_large_set_and_how_little_is_read(
    count: int, of: Callable[[np.ndarray], np.ndarray], said: str
) -> None:
    read = []
    train = numbers(count, lambda indices: read.append(len(indices)) or of(indices))  # type: ignore[func-returns-value]
    problems: list[Any] = mistakes.find(
        mistakes.View({"train": train, "test": numbers(9, lambda n: -1 - n)}), Path("set")
    )
    assert said in " ".join(each.found for each in problems) and bool(problems) == bool(said)
    assert sum(read) <= 3 * mistakes.LOOKED_AT
