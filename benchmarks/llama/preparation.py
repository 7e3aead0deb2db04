"""Declaration of the pretraining data that Llama 3.1 8B and gpt-oss-20b share."""

import argparse
from pathlib import Path
from typing import Sequence

from benchmarks.common.data import prepare
from benchmarks.common.data.manifest import Add, Manifest
from benchmarks.common.data.problem import Problem

BENCHMARKS = ("llama31-8b", "gpt-oss-20b")


def _add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the model; default: that of the source")
    add(
        "--vocabulary-size",
        type=prepare.number(512, 1 << 20),
        metavar="N",
        help="learn a tokenizer of N entries; default: 1,024 for the toy data set, else none",
    )
    add(
        "--append-eod",
        action="store_true",
        help="append <|end_of_text|> to each document; the reference does not, the toy data set has it",
    )


def _check_documents(directory: Path, manifest: Manifest, quick: bool, add: Add) -> Sequence[Problem]:
    # The complete index, and unless quick, all tokens
    from benchmarks.llama import megatron

    try:
        for part in ("train", "test"):
            megatron.check_index(directory / part)
            if not quick:
                megatron.check_tokens(directory / part, int(manifest["facts"]["vocabulary"]))
    except Problem as problem:
        return [problem]
    return []


def data_set(benchmark: str) -> prepare.DataSet:
    """Return the declaration of the shared data set; ``benchmark`` is the name of the benchmark that prepares it."""
    return prepare.DataSet(
        benchmark=benchmark,
        source="folder of MLPerf's c4-*.bin and .idx, or of text or JSON lines for training and evaluation",
        files=("train.bin", "train.idx", "test.bin", "test.idx", "tokenizer.json"),
        add_options=_add_options,
        writer="benchmarks.llama.writer",
        samples="benchmarks.llama.samples",
        check=prepare.opens("benchmarks.llama.dataset"),
        check_unlisted=_check_documents,
        shared_with=BENCHMARKS,
    )
