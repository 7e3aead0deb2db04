"""Writes token ids as Megatron does: links the files that are tokenized already, or tokenizes text file by file."""

import argparse
import hashlib
import os
import platform
import shutil
from itertools import islice
from pathlib import Path
from typing import Dict, List, Set

import numpy as np
import tokenizers

from benchmarks.common.data import source_checks
from benchmarks.common.data.files import in_one_step, read_facts, write_facts
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.llama import sources, tokenization
from benchmarks.llama.dataset import PARTS
from benchmarks.llama.megatron import check_index, check_tokens, open_documents, type_for, write_index
from benchmarks.llama.sources import Source

VERSION = "1"  # increase it if the output for the same source and options changes
TOGETHER = 1000  # documents per call of the tokenizer, which uses all cores
SMALL = 1024  # entries of the toy data set's tokenizer
ROOM_FACTOR = 2.0  # maximum bytes written per byte of text: a token of two or four bytes rarely has fewer letters


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    # Find the files. The fingerprint includes everything that determines the output.
    source = sources.find(args) if args.origin is not None else None
    if source is None and args.tokenizer:
        raise Problem("--tokenizer without raw data", "both only with your own text", "pass the text")
    listed: List[Path] = []
    if source:
        listed = [*source.train, *source.test, *([source.tokenizer] if source.tokenizer else [])]
        listed += [path.with_suffix(".idx") for path in (*source.train, *source.test) if source.is_indexed]
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in listed]
    settings = (VERSION, source and source.name, args.name, "" if source else platform.python_version())
    key = repr((settings, tokenizers.__version__, files, args.vocabulary_size, args.append_eod))
    return Listing(source, hashlib.sha256(key.encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write both parts and the tokenizer.

    Raises:
        Problem: the source is damaged, too small or does not match the tokenizer.
    """
    source: Source = listing.source or sources.toy_data_set(scratch, args.name)
    tokenizer = _tokenizer(source, args, scratch)
    entries = tokenizer.get_vocab_size()
    common = 0
    if source.is_indexed:
        _link(source, scratch)
    else:
        appends = args.append_eod or listing.source is None
        common = _tokenize(source, tokenizer, appends, args.allow_overlap, scratch, progress)
    documents = {part: open_documents(scratch / part) for part in PARTS}
    tokens = {part: len(document_set.tokens) for part, document_set in documents.items()}
    add = progress.counter("tokens", sum(document_set.tokens.nbytes for document_set in documents.values()))
    for part in PARTS:
        check_tokens(scratch / part, entries, add)
    counts = {part: len(document_set.lengths) for part, document_set in documents.items()}
    return Content(
        name=source.name,
        splits={part: Split(counts[part], (f"{part}.bin", f"{part}.idx", tokenization.FILE)) for part in PARTS},
        summary=f"{tokens['train']:,} + {tokens['test']:,} tokens of {entries:,} entries",
        facts={"vocabulary": entries, "tokens": tokens, "documents": counts},
        how={"made": source.made, "in_both": common, "append_eod": args.append_eod or listing.source is None},
        tool={"version": VERSION, "numpy": np.__version__, "tokenizers": tokenizers.__version__},
    )


def _tokenizer(source: Source, args: argparse.Namespace, scratch: Path) -> tokenizers.Tokenizer:
    # Return the given tokenizer, or train one on the training text; write its file.
    path = scratch / tokenization.FILE
    if not path.exists():
        if source.tokenizer:
            tokenizer = tokenization.read(source.tokenizer)
        else:
            texts = (text for file in source.train for text in sources.documents(file))
            tokenizer = tokenization.learn(texts, args.vocabulary_size or SMALL)
        with in_one_step(path) as file:
            file.write(source.tokenizer.read_bytes() if source.tokenizer else tokenizer.to_str(pretty=True).encode())
    return tokenization.read(path)


def _link(source: Source, scratch: Path) -> None:
    # Link the files with their new names, or copy them if they are on another disk.
    for part, (path,) in zip(PARTS, (source.train, source.test)):
        check_index(path.with_suffix(""))
        for ending in (".bin", ".idx"):
            to, origin = scratch / f"{part}{ending}", path.with_suffix(ending)
            if to.exists():
                continue
            try:
                os.link(str(origin), str(to))
            except OSError:
                check_room(scratch, origin.stat().st_size)
                with in_one_step(to) as file, origin.open("rb") as content:
                    shutil.copyfileobj(content, file)


def _tokenize(
    source: Source, tokenizer: tokenizers.Tokenizer, appends: bool, allows: bool, scratch: Path, progress: Progress
) -> int:
    # Tokenize an interrupted preparation's remaining files and join all; return the documents in both parts.
    ends = [tokenizer.token_to_id(tokenization.END)] if appends else []
    if None in ends:
        raise Problem(
            f"the tokenizer has no {tokenization.END}",
            "a tokenizer of Llama 3",
            "omit --append-eod, or use another tokenizer",
        )
    kind, files = type_for(tokenizer.get_vocab_size()), {"train": source.train, "test": source.test}
    sizes = {path: path.stat().st_size for paths in files.values() for path in paths}
    check_room(scratch, int(ROOM_FACTOR * sum(sizes.values())))
    # The facts of each tokenized file; its ids are next to them.
    parts = {part: [scratch / f"{part}-{n:05}.json" for n in range(len(paths))] for part, paths in files.items()}
    finished = sum(facts.exists() for shards in parts.values() for facts in shards)
    if finished:
        progress.note(f"resuming: {finished:,} of {len(sizes):,} files were tokenized before")
    done = 0
    for part, paths in files.items():
        for path, facts in zip(paths, parts[part]):
            progress.update("tokenize", done, sum(sizes.values()), unit="bytes")
            if not facts.exists():
                write_facts(facts, _write_part(path, facts.with_suffix(".ids"), tokenizer, ends, kind))
            done += sizes[path]
    facts_of_part = {part: [read_facts(facts) for facts in shards] for part, shards in parts.items()}
    test_documents = [
        (text[1], text[0])
        for file_facts in facts_of_part["test"]
        for text in zip(file_facts["keys"], file_facts["begins"])
    ]
    trained: Set[str] = {key for file_facts in facts_of_part["train"] for key in file_facts["keys"]}
    common = source_checks.overlap(test_documents, trained, "documents", allows, progress)
    for part, shards in parts.items():
        lengths = [length for file_facts in facts_of_part[part] for length in file_facts["lengths"]]
        if not lengths:
            raise Problem(f"{', '.join(map(str, files[part][:3]))}: no documents", "text", "add to the source")
        with in_one_step(scratch / f"{part}.bin") as file:
            for facts in shards:
                with facts.with_suffix(".ids").open("rb") as content:
                    shutil.copyfileobj(content, file)
        with in_one_step(scratch / f"{part}.idx") as file:
            write_index(file, lengths, kind)
    return common


def _write_part(
    path: Path, to: Path, tokenizer: tokenizers.Tokenizer, ends: List[int], kind: "np.dtype[np.generic]"
) -> Dict[str, List[object]]:
    # Tokenize a file's documents and write the ids; return lengths and keys, and for evaluation the first characters.
    lengths: List[object] = []
    keys: List[object] = []
    begins: List[object] = []
    with in_one_step(to) as file:
        documents = sources.documents(path)
        for texts in iter(lambda: list(islice(documents, TOGETHER)), []):
            for text, ids in zip(texts, tokenization.encode(tokenizer, texts)):
                if ids:
                    document = np.array([*ids, *ends], kind)
                    file.write(document.tobytes())
                    lengths.append(len(document))
                    keys.append(source_checks.key(text.encode()))
                    begins.append(f"the one that starts with: {text[:40]}" if to.name.startswith("test") else "")
    return {"lengths": lengths, "keys": keys, "begins": begins}
