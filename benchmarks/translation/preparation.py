"""Command line of both benchmarks' ``prepare.py``, and the declaration of the data set."""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.common.data import prepare
from benchmarks.translation import FILES

MERGES = 32000  # ``bpe.32000`` of GNMT's download_dataset.sh (v0.5 to v0.7)


def _add_options(corpus: str, tokens: str, options: argparse._ArgumentGroup) -> None:
    # How text is found, cleaned and cut into tokens.
    add = options.add_argument
    add("--corpus", choices=("wmt16", "wmt17"), default=corpus, help="list of WMT's archives; default: %(default)s")
    add(
        "--tokens",
        choices=("auto", "bpe", "subtokens"),
        default=tokens,
        help="default: %(default)s; auto takes subtokens where there is a dictionary and for WMT's archives",
    )
    add("--languages", nargs=2, metavar=("SOURCE", "TARGET"), help="of train.XX and train.YY; default: English first")
    add("--test", metavar="NAME", help="the test part, as test.2016 of test.2016.en and test.2016.de; default: test")
    add("--tokenized", action="store_true", help="the text is already tokenized, as by Moses' tokenizer")
    add(
        "--merges",
        type=prepare.number(1, 10**6),
        default=MERGES,
        metavar="N",
        help="pairs that BPE merges, learnt from the training text; default: %(default)s, as submitted",
    )
    add("--codes", type=Path, metavar="FILE", help="existing merges of subword-nmt")
    add(
        "--dictionary",
        type=Path,
        metavar="FILE",
        help="subtokens of a submission, such as reference_dictionary.ende.txt",
    )
    add(
        "--longest",
        type=prepare.number(1, 10**6),
        metavar="N",
        help="leave out pairs with more words in a side; default: 80, as submitted for bpe",
    )


def data_set(benchmark: str, corpus: str, tokens: str) -> prepare.DataSet:
    """Return the declaration for a parallel data set, with the benchmark's WMT corpus and kind of tokens."""
    return prepare.DataSet(
        benchmark=benchmark,
        source="folder of WMT's archives, or of train.XX, train.YY, test.XX and test.YY with XX and YY the languages",
        files=FILES,
        add_options=partial(_add_options, corpus, tokens),
        writer="benchmarks.translation.writer",
        samples="benchmarks.translation.samples",
        check=prepare.opens("benchmarks.translation.arrays"),
    )
