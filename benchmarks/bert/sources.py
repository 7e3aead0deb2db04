"""Preparation source (files in a folder, by name, or the toy data set), and its task."""

import argparse
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence, Tuple

from benchmarks.bert import texts, wikipedia
from benchmarks.bert.masking import Settings
from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Workers
from benchmarks.language import VOCABULARY as WRITTEN
from benchmarks.language import python_text, tensorflow_files
from benchmarks.language.arrays import Samples

VOCABULARY = "vocab.txt"
EXPECTED = "a dump (*.xml or *.xml.bz2), clean text (*.txt, wiki_*, part-*) or records (*.tfrecord, *.hdf5)"
TFRECORD, HDF5 = "tfrecord", "hdf5"
PACKED = (TFRECORD, HDF5)
ENDINGS = {".tfrecord": TFRECORD, ".tfrecords": TFRECORD, ".hdf5": HDF5, ".h5": HDF5}


class File(NamedTuple):
    path: Path
    form: str


class Source(NamedTuple):
    # Files to prepare, and the name of the data set.

    name: str
    train: Tuple[File, ...]
    test: Tuple[File, ...]  # empty where the evaluation set is cut from the training text
    vocabulary: Optional[Path]  # None to learn it
    made: str
    listed: Optional[Path] = None  # md5 of the documents for evaluation, one per line

    @property
    def is_packed(self) -> bool:
        return self.train[0].form in PACKED


class Task(NamedTuple):
    # A preparation: source and settings.

    source: Source
    settings: Settings
    entries: int  # size of the vocabulary to learn; 0 where the source has one
    most: int  # maximum samples of the evaluation set
    allows_overlap: bool  # whether an evaluation set that is trained on is accepted
    seed: int
    scratch: Path
    workers: Workers

    @property
    def vocabulary(self) -> Path:
        # The file of the vocabulary, as it will be published.
        return self.scratch / WRITTEN


class Prepared(NamedTuple):
    # A task's results before the arrays are written.

    train: Sequence[str]  # stems of the shards
    test: Samples
    width: Tuple[int, int]  # maximum number of tokens and masked tokens per sample
    facts: Mapping[str, Any]
    how: Mapping[str, Any]


def find(args: argparse.Namespace) -> Source:
    """Find the raw data.

    Raises:
        Problem: there are no readable files, or no vocabulary.
    """
    origin: Path = args.origin
    train = files_of(origin, args.paragraphs)
    test = files_of(args.evaluation, args.paragraphs) if args.evaluation else ()
    for path, files in ((origin, train), (args.evaluation, test)):
        if path and not files:
            raise Problem(f"{path} contains none of these", EXPECTED, "pass the folder that contains them")
        text_files.check_shards([file.path for file in files])
    test_paths = {file.path.resolve() for file in test}
    train = tuple(file for file in train if file.path.resolve() not in test_paths)
    packed = {file.form in PACKED for file in (*train, *test)}
    if len(packed) > 1:
        raise Problem(f"{origin} has both text and records", "one of them", "pass a folder with one kind of data")
    if not train:
        raise Problem(f"{origin} has evaluation data only", "training text next to it", "pass other raw data")
    if packed == {True} and not test:
        raise Problem(
            f"{origin} has training records only",
            "an evaluation set",
            "pass the folder of the evaluation records with --evaluation",
        )
    if args.evaluation_list and (args.evaluation or packed == {True}):
        raise Problem(
            f"--evaluation-list {args.evaluation_list}",
            "a list only for text from which the evaluation set is selected",
            "omit one of the two" if args.evaluation else "leave it out",
        )
    origin_text = f"{len(train):,} files of {' and '.join(sorted({file.form for file in train}))}"
    return Source(args.name or origin.stem, train, test, _vocabulary(args, origin), origin_text, args.evaluation_list)


def _vocabulary(args: argparse.Namespace, origin: Path) -> Optional[Path]:
    folder = origin if origin.is_dir() else origin.parent
    path: Optional[Path] = args.vocabulary or next((entry for entry in [folder / VOCABULARY] if entry.is_file()), None)
    if path is None and not args.vocabulary_size:
        raise Problem(
            f"{folder} has no {VOCABULARY}",
            "the vocabulary of the model",
            f"put BERT's {VOCABULARY} there, name it with --vocabulary, or learn one with --vocabulary-size 30522",
        )
    if path is not None and args.vocabulary_size:
        raise Problem(f"--vocabulary-size and {path}", "one of them", "leave one out")
    return path


def files_of(origin: Path, paragraphs: bool) -> Tuple[File, ...]:
    """Return the readable files in a folder, sorted by path; or the given file."""
    if not origin.exists():
        raise Problem(f"{origin} does not exist", EXPECTED, "name another one")
    is_file = not origin.is_dir()
    paths = [origin] if is_file else sorted(entry for entry in origin.rglob("*") if entry.is_file())
    all_files = (File(path, _form_of(path, paragraphs, is_file)) for path in paths)
    return tuple(file for file in all_files if file.form)


def _form_of(path: Path, paragraphs: bool, is_file: bool) -> str:
    # Return a file's form, or an empty string for other files; the reference's record names lack a suffix.
    if path.name == VOCABULARY:
        return ""
    if wikipedia.is_dump(path):
        return wikipedia.DUMP
    packed = ENDINGS.get(path.suffix.lower(), "")
    if not packed and path.name.startswith("part"):
        with path.open("rb") as file:
            head = file.read(12)
        packed = TFRECORD if tensorflow_files.is_record(head) else HDF5 if head.startswith(b"\x89HDF") else ""
    if packed:
        return packed
    name = text_files.plain_name(path)
    is_text = Path(name).suffix in (".txt", ".raw") or name.startswith(("wiki_", "part-"))
    if is_text or is_file or (name != path.name and name.endswith(".xml")):
        text_files.check(path, "text, or a dump as .xml or .xml.bz2")
        form = texts.form_of(path)
        return texts.PARAGRAPHS if paragraphs and form == texts.SENTENCES else form
    return ""


def toy_data_set(folder: Path, name: Optional[str]) -> Source:
    # Write the text of the toy data set; written anew after an interruption, it is the same.
    path = folder / "python.txt"
    origin_text = python_text.write_text(path)
    return Source(name or python_text.NAME, (File(path, texts.SENTENCES),), (), None, origin_text)
