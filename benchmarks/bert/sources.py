"""What is prepared: files found in a folder by their names, or the small set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple

from benchmarks.bert import python_text, texts
from benchmarks.common.data.problem import Problem

VOCABULARY = "vocab.txt"
EXPECTED = "a dump (*.xml or *.xml.bz2), clean text (*.txt, wiki_*, part-*) or records (*.tfrecord, *.hdf5)"


class File(NamedTuple):
    """One file of text or records."""

    path: Path
    form: str


class Source(NamedTuple):
    """What there is, and how it is called."""

    name: str
    train: Tuple[File, ...]
    test: Tuple[File, ...]
    """Empty where the evaluation set is cut from the training text."""
    vocabulary: Optional[Path]
    """None to learn it."""
    made: str


def find(args: argparse.Namespace) -> Source:
    """Return what ``--from`` holds.

    Raises:
        Problem: it holds nothing that can be read, or there is no vocabulary.
    """
    origin: Path = args.origin
    train = files_of(origin, args.paragraphs)
    test = files_of(args.evaluation, args.paragraphs) if args.evaluation else ()
    if not train:
        raise Problem(f"{origin} holds none of these", EXPECTED, "name the folder that has them with --from")
    kinds = sorted({each.form for each in train})
    made = f"{len(train):,} files of {' and '.join(kinds)}"
    return Source(args.name or origin.stem, train, test, _vocabulary(args, origin), made)


def _vocabulary(args: argparse.Namespace, origin: Path) -> Optional[Path]:
    folder = origin if origin.is_dir() else origin.parent
    path: Optional[Path] = args.vocabulary or next((each for each in [folder / VOCABULARY] if each.is_file()), None)
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
    """Return the files of a folder that can be read, sorted by their path; or the one that is named."""
    if not origin.exists():
        raise Problem(f"{origin} does not exist", EXPECTED, "name another one")
    paths = sorted(each for each in origin.rglob("*") if each.is_file()) if origin.is_dir() else [origin]
    found: List[File] = []
    for path in paths:
        form = _form_of(path, paragraphs, named=not origin.is_dir())
        if form:
            found.append(File(path, form))
    return tuple(found)


def _form_of(path: Path, paragraphs: bool, named: bool) -> str:
    """Return the form of a file, or nothing where it is not one of the source's."""
    if path.name == VOCABULARY:
        return ""
    if path.suffix in (".txt", ".raw") or path.name.startswith(("wiki_", "part-")) or named:
        form = texts.form_of(path)
        return texts.PARAGRAPHS if paragraphs and form == texts.SENTENCES else form
    return ""


def small_set(folder: Path, name: Optional[str]) -> Source:
    """Write the text of the small set; written anew after an interruption, it is the same."""
    path = folder / "python.txt"
    made = python_text.write_text(path)
    return Source(name or python_text.NAME, (File(path, texts.SENTENCES),), (), None, made)
