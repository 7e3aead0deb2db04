"""Prepare BERT's pretraining data: samples with a manifest, or check a prepared data set.

    $ python -m benchmarks.bert.prepare -o data/bert                       # the toy data set
    $ python -m benchmarks.bert.prepare /raw/wiki -o /data/bert     # a dump, or clean text, with vocab.txt
    $ python -m benchmarks.bert.prepare /raw/hdf5 --evaluation /raw/eval_hdf5 -o /data/bert
    $ python -m benchmarks.bert.prepare --verify /data/bert

Writes the files that benchmarks/language/arrays.py describes and, last, dataset.json. Give an interrupted command
again and it continues. Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.common.data import prepare
from benchmarks.language import FILES


def _add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--vocabulary", type=Path, metavar="FILE", help="entries, one per line; default: vocab.txt of the source")
    add(
        "--vocabulary-size",
        type=prepare.number(64, 1 << 16),
        metavar="N",
        help="learn a vocabulary of N entries; default: 2,048 for the toy data set, else none",
    )
    add(
        "--sequence-length",
        type=prepare.number(8, 1 << 15),
        metavar="N",
        help="maximum number of tokens per sample; default: 512, as submitted, 128 for the toy data set",
    )
    add(
        "--predictions",
        type=prepare.number(1, 1 << 15),
        metavar="N",
        help="maximum number of masked words per sample; default: 76 of 512, 20 of 128, as submitted, else 15 %%",
    )
    add(
        "--duplication",
        type=prepare.number(1, 1000),
        default=10,
        metavar="N",
        help="passes over each document, with other pairs and masks; default: %(default)s, as submitted",
    )
    add(
        "--evaluation",
        type=Path,
        metavar="PATH",
        help="text or records of the evaluation set; default: articles of the source, as MLPerf cut them",
    )
    add(
        "--evaluation-list",
        type=Path,
        metavar="FILE",
        help="md5 of the articles for evaluation, one per line, such as wiki_test_set_md5.txt of the submission",
    )
    add(
        "--evaluation-samples",
        type=prepare.number(1, 10**9),
        metavar="N",
        help="maximum number of evaluation samples; default: 10,000, as submitted, 1,000 for the toy data set",
    )
    add("--paragraphs", action="store_true", help="lines of plain text are paragraphs: split them into sentences")


DATA_SET = prepare.DataSet(
    benchmark="bert",
    source="folder or file of a Wikipedia dump, of clean text or of MLPerf's records, with vocab.txt",
    files=FILES,
    add_options=_add_options,
    writer="benchmarks.bert.writer",
    samples="benchmarks.language.samples",
    check=prepare.opens("benchmarks.language.arrays"),
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
