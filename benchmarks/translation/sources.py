"""Preparation source: aligned text files found by name, or the toy data set."""

import argparse
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from benchmarks.common.data import text_files
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Workers
from benchmarks.translation import language, segment, wmt
from benchmarks.translation.stages import RAW, SPLIT, TOKENIZED, WHOLE
from benchmarks.translation.vocabulary import JOIN

SAMPLE_BYTES = 1 << 20  # leading bytes of the file that are checked for BPE
CODES = ("codes", "codes.txt", "code", "bpe.codes", "bpe.32000")  # names of files with BPE codes


class Item(NamedTuple):
    # A text file: on disk, or an archive member.

    path: Path
    member: str = ""  # name in the archive without folders, or without .gz; empty for a file on disk
    origin: str = ""  # where it was unpacked from, for messages

    def __str__(self) -> str:
        return self.origin or str(self.path)


class Corpus(NamedTuple):
    source: Item
    target: Item


class Source(NamedTuple):
    name: str
    train: Tuple[Corpus, ...]
    test: Corpus
    languages: Tuple[str, str]
    form: str  # RAW, TOKENIZED, SPLIT or WHOLE
    codes: Optional[Path]  # given BPE codes; None to learn them, or for no BPE
    made: str  # how the parts came about, for the manifest
    dictionary: Optional[Path] = None  # entries of subtokens; None for byte pair encoding
    corpus: str = ""  # list of WMT's archives; empty for other text
    latin: bool = False  # whether training pairs outside of Latin-1 are dropped


def find(args: argparse.Namespace) -> Source:
    """Find the raw data in a folder.

    Raises:
        Problem: neither text nor archives exist, files are missing, or a required dictionary is missing.
    """
    origin: Path = args.origin
    if not origin.is_dir():
        raise Problem(f"{origin} is not a folder", "a folder of text, or of WMT's archives", "pass it as the raw data")
    is_wmt = not any(origin.glob("train.*")) and wmt.holds_wmt(origin)
    if is_wmt:
        source = _find_wmt(origin, args.corpus, args.languages or wmt.LANGUAGES)
    else:
        source = find_text(origin, args.languages or (), args.test, args.tokenized)
    source = source._replace(name=args.name or source.name, codes=args.codes or source.codes)
    dictionary = args.dictionary or next(origin.glob(segment.DICTIONARY), None)
    if args.tokens == "bpe" or (args.tokens == "auto" and not dictionary and not is_wmt):
        return source
    if source.form == SPLIT:
        raise Problem(f"{origin} is split by BPE", "text to split into subtokens", "add --tokens bpe")
    if not dictionary:
        raise Problem(
            f"{origin} has no {segment.DICTIONARY}",
            "the entries of subtokens",
            "copy it from mlcommons/training_results_v0.7, NVIDIA/benchmarks/transformer/implementations/pytorch, into "
            "the folder; or add --tokens bpe",
        )
    return source._replace(form=WHOLE, dictionary=dictionary, codes=None, latin=False)


def _find_wmt(origin: Path, corpus: str, languages: Sequence[str]) -> Source:
    if sorted(languages) != sorted(wmt.LANGUAGES):
        raise Problem(
            f"--languages {' '.join(languages)}",
            f"{' '.join(wmt.LANGUAGES)}: WMT's archives are read for these",
            "leave it out",
        )
    corpus_paths = wmt.locate(origin, corpus)
    first, second = languages
    corpora = [Corpus(*(Item(*paths_of_language[code]) for code in languages)) for paths_of_language in corpus_paths]
    origin_text = f"{', '.join(item.stem for item in wmt.CORPORA[corpus])}; {wmt.TEST} to test"
    name = f"{corpus}-{first}-{second}"
    pair = (first, second)
    return Source(
        name, tuple(corpora[:-1]), corpora[-1], pair, RAW, None, origin_text, latin=corpus == "wmt16", corpus=corpus
    )


def extract(source: Source, scratch: Path, pool: Workers) -> Source:
    # Return the source with all text extracted to disk.
    items = [item for corpus in (*source.train, source.test) for item in corpus]
    folder = scratch / "text"
    folder.mkdir(exist_ok=True)
    packed: Dict[Path, Tuple[str, ...]] = {}
    for item in items:
        # An SGM file may be on the disk already.
        if item.member and item.path.name != item.member:
            packed[item.path] = (*packed.get(item.path, ()), item.member)
    tasks = [wmt.Extraction(str(path), members, str(folder)) for path, members in packed.items()]
    if tasks:
        pool.run("extract", "bytes", wmt.extract, tasks, lambda task: task.size, lambda task: task.is_done)
    corpora = [Corpus(*(_on_disk(item, folder) for item in pair)) for pair in (*source.train, source.test)]
    published = zip(corpora[-1], source.test) if source.corpus else ()
    for item, origin in published:
        # For English, the known md5 of newstest2014 is of the plain file, not of the SGM.
        expected_md5 = wmt.KNOWN_MD5.get(item.path.name)
        if expected_md5 and (item.path.suffix == ".de" or not origin.member):
            wmt.check_test(item.path, expected_md5)
    return source._replace(train=tuple(corpora[:-1]), test=corpora[-1])


def _on_disk(item: Item, folder: Path) -> Item:
    if not item.member:
        return item
    path = item.path if item.path.name == item.member else folder / item.member
    if path.suffix != ".sgm":
        return Item(path, origin=str(item.path if item.path.suffix == wmt.PACKED else f"{item.member} in {item.path}"))
    plain = folder / f"{wmt.TEST}{Path(path.stem).suffix}"
    plain.write_text("".join(line + "\n" for line in wmt.read_sgm(path)), encoding="utf-8", newline="\n")
    return Item(plain, origin=str(item.path))


def find_text(origin: Path, languages: Sequence[str], test: Optional[str], tokenized: bool) -> Source:
    """Find ``train.XX`` and ``train.YY`` with a test part in the same languages.

    Raises:
        Problem: files are missing or ambiguous.
    """
    files: Dict[str, Item] = {}
    for path in sorted(filter(Path.is_file, origin.iterdir())):  # train.en before train.en.gz
        if path.suffix in text_files.PACKED_SUFFIXES and path.suffix != wmt.PACKED and path.name.startswith("train."):
            text_files.check(path, f"text, or {path.stem}{wmt.PACKED}")
        member = path.stem if path.suffix == wmt.PACKED else ""
        files.setdefault(member or path.name, Item(path, member))
    suffixes = [name[len("train.") :] for name in files if name.startswith("train.")]
    if len(suffixes) < 2:
        raise Problem(
            f"{origin} has {', '.join(sorted('train.' + language for language in suffixes)) or 'no train.*'}",
            "train.XX and train.YY with XX and YY the languages, such as train.en and train.de; or WMT's archives",
            "pass the folder that contains them",
        )
    pair = _pick_languages(suffixes, languages, origin)
    stems = [name[: -len(pair[0]) - 1] for name in files if name.endswith(f".{pair[0]}")]
    parts = [stem for stem in stems if stem != "train" and f"{stem}.{pair[1]}" in files]
    test_part = _pick_test(parts, test, pair, origin)
    train, test_corpus = (Corpus(*(files[f"{part}.{language}"] for language in pair)) for part in ("train", test_part))
    for item in (*train, *test_corpus):
        text_files.check(item.path, f"text, or {item.path.name}{wmt.PACKED}", {wmt.PACKED} if item.member else ())
    form = SPLIT if _is_split(train.source) or _is_split(train.target) else TOKENIZED if tokenized else RAW
    codes = next((files[name].path for name in CODES if name in files and not files[name].member), None)
    origin_text = f"train.{pair[0]} and train.{pair[1]}; {test_part}.{pair[0]} and {test_part}.{pair[1]} to test"
    return Source(origin.name, (train,), test_corpus, pair, form, codes, origin_text)


def _pick_languages(available: Sequence[str], requested: Sequence[str], origin: Path) -> Tuple[str, str]:
    # Return (source, target) as requested, by default English first.
    if requested:
        missing = [language for language in requested if language not in available]
        if missing:
            names = ", ".join(f"train.{language}" for language in available)
            raise Problem(f"{origin} has {names}", f"train.{missing[0]}", "name other --languages")
        return requested[0], requested[1]
    if len(available) > 2:
        raise Problem(
            f"{origin} has text in {', '.join(available)}",
            "two languages",
            f"add --languages {available[0]} {available[1]}",
        )
    first, second = sorted(available, key=lambda language: (language != "en", language))
    return first, second


def _pick_test(parts: Sequence[str], requested: Optional[str], pair: Sequence[str], origin: Path) -> str:
    test_parts = [part for part in parts if part.startswith(("test", "newstest"))]
    part_name = requested or ("test" if "test" in test_parts else None)
    if part_name is None and len(test_parts) == 1:
        return test_parts[0]
    if part_name in parts:
        return str(part_name)
    files = ", ".join(f"{part}.{pair[0]}/{pair[1]}" for part in parts) or "train alone"
    raise Problem(
        f"{origin} has {files}",
        f"the test pairs: {part_name or 'test'}",
        f"add --test {test_parts[0]}" if test_parts else f"add test.{pair[0]} and test.{pair[1]} to the folder",
    )


def _is_split(item: Item) -> bool:
    with text_files.undamaged(item.path), text_files.open_binary(item.path) as file:
        return f"{JOIN} ".encode() in file.read(SAMPLE_BYTES)


def toy_data_set(folder: Path, seed: int, name: Optional[str]) -> Source:
    # Write the text of the toy data set; written anew after an interruption, it is the same.
    folder.mkdir(exist_ok=True)
    language.write_text(folder, seed)
    return find_text(folder, language.LANGUAGES, "test", False)._replace(
        name=name or language.NAME, made="a synthetic language and its translation by rules, generated"
    )
