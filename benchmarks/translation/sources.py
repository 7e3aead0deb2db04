"""What is prepared: aligned text files found in a folder by their names, or the small set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.translation import language
from benchmarks.translation.stages import RAW, SPLIT, TOKENIZED
from benchmarks.translation.vocabulary import JOIN

SAMPLE_BYTES = 1 << 20
"""At the beginning of a file, where BPE is looked for."""
CODES = ("codes", "codes.txt", "code", "bpe.codes", "bpe.32000")
"""What files of merges are called."""


class Item(NamedTuple):
    """One file of text: on the disk, or a member of an archive."""

    path: Path
    member: str = ""
    """Its name in the archive, without folders; empty for a file on the disk."""


class Corpus(NamedTuple):
    """Two aligned files."""

    source: Item
    target: Item


class Source(NamedTuple):
    """Raw data of both parts."""

    name: str
    train: Tuple[Corpus, ...]
    test: Corpus
    languages: Tuple[str, str]
    form: str
    """RAW, TOKENIZED or SPLIT."""
    codes: Optional[Path]
    """Merges that are given; None to learn them, or none."""
    made: str
    """How the parts came about, for the passport."""
    dictionary: Optional[Path] = None
    """Entries of subtokens; None for byte pair encoding."""
    latin: bool = False
    """Whether pairs outside of Latin-1 are left out of training."""


def find(args: argparse.Namespace) -> Source:
    """Return what the folder of ``--from`` holds."""
    source = find_text(args.origin, args.languages or (), args.test, args.tokenized)
    return source._replace(name=args.name or source.name, codes=args.codes or source.codes)


def extract(source: Source, scratch: Path, progress: Progress) -> Source:
    """Return the source with all of its text on the disk."""
    return source


def find_text(origin: Path, languages: Sequence[str], test: Optional[str], tokenized: bool) -> Source:
    """Find ``train.XX`` and ``train.YY`` with a test part of the same languages.

    Raises:
        Problem: files are missing, or several could be meant.
    """
    files = {path.name: path for path in sorted(origin.iterdir()) if path.is_file()}
    found = [name[len("train.") :] for name in files if name.startswith("train.")]
    if len(found) < 2:
        raise Problem(
            f"{origin} has {', '.join(sorted('train.' + each for each in found)) or 'no train.*'}",
            "train.XX and train.YY with XX and YY the languages, such as train.en and train.de; or WMT's archives",
            "name the folder that has them with --from",
        )
    pair = _pick_languages(found, languages, origin)
    parts = _test_parts(files, pair)
    chosen = _pick_test(parts, test, pair, origin)
    train = Corpus(*(Item(files[f"train.{each}"]) for each in pair))
    form = SPLIT if _is_split(train.source.path) or _is_split(train.target.path) else TOKENIZED if tokenized else RAW
    codes = next((files[name] for name in CODES if name in files), None)
    made = f"train.{pair[0]} and train.{pair[1]}; {chosen}.{pair[0]} and {chosen}.{pair[1]} to test"
    held = Corpus(*(Item(files[f"{chosen}.{each}"]) for each in pair))
    return Source(origin.name, (train,), held, pair, form, codes, made)


def _pick_languages(found: Sequence[str], wanted: Sequence[str], origin: Path) -> Tuple[str, str]:
    """Return source and target: as they were asked for, else English first."""
    if wanted:
        missing = [each for each in wanted if each not in found]
        if missing:
            names = ", ".join(f"train.{each}" for each in found)
            raise Problem(f"{origin} has {names}", f"train.{missing[0]}", "name other --languages")
        return wanted[0], wanted[1]
    if len(found) > 2:
        expected = "two languages"
        raise Problem(f"{origin} has text in {', '.join(found)}", expected, f"add --languages {found[0]} {found[1]}")
    first, second = sorted(found, key=lambda each: (each != "en", each))
    return first, second


def _test_parts(files: Dict[str, Path], pair: Sequence[str]) -> List[str]:
    stems = [name[: -len(pair[0]) - 1] for name in files if name.endswith(f".{pair[0]}")]
    return [stem for stem in stems if stem != "train" and f"{stem}.{pair[1]}" in files]


def _pick_test(parts: Sequence[str], wanted: Optional[str], pair: Sequence[str], origin: Path) -> str:
    known = [part for part in parts if part.startswith(("test", "newstest"))]
    named = wanted or ("test" if "test" in known else None)
    if named is None and len(known) == 1:
        return known[0]
    if named in parts:
        return str(named)
    files = ", ".join(f"{part}.{pair[0]}/{pair[1]}" for part in parts) or "train alone"
    remedy = f"add --test {known[0]}" if known else f"add test.{pair[0]} and test.{pair[1]} to the folder"
    raise Problem(f"{origin} has {files}", f"the pairs to test on: {named or 'test'}", remedy)


def _is_split(path: Path) -> bool:
    with path.open("rb") as file:
        return f"{JOIN} ".encode() in file.read(SAMPLE_BYTES)


def small_set(folder: Path, seed: int, name: Optional[str]) -> Source:
    """Write the text of the small set; written anew after an interruption, it is the same."""
    folder.mkdir(exist_ok=True)
    language.write_text(folder, seed)
    made = "a synthetic language and its translation by rules, generated"
    return find_text(folder, language.LANGUAGES, "test", False)._replace(name=name or language.NAME, made=made)
