"""Prepare the data set of questions: windows of paragraphs with a manifest, or check a prepared one.

    $ python -m benchmarks.bert_squad.prepare -o data/bert-squad                      # the toy data set
    $ python -m benchmarks.bert_squad.prepare /raw/squad -o /data/squad        # SQuAD v1.1 and vocab.txt
    $ python -m benchmarks.bert_squad.prepare --verify /data/squad

Writes the files that benchmarks/bert_squad/arrays.py describes and, last, dataset.json. Give an interrupted command
again and it starts over. Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

import argparse
from functools import partial

from benchmarks.bert_squad import FILES
from benchmarks.common.data import prepare


def add_options(options: argparse._ArgumentGroup) -> None:
    # How paragraphs become windows; all in tokens.
    add = options.add_argument
    add(
        "--sequence-length",
        type=prepare.number(16, 512),
        metavar="N",
        help="tokens of a window, at most; default: 384, of the toy data set 40",
    )
    add(
        "--stride",
        type=prepare.number(1, 512),
        metavar="N",
        help="tokens between the begins of two windows; default: 128, of the toy data set 12",
    )
    add(
        "--question-length",
        type=prepare.number(1, 256),
        metavar="N",
        help="tokens of a question, at most; default: 64, of the toy data set 12",
    )


DATA_SET = prepare.DataSet(
    benchmark="bert-squad",
    source="folder of train-v1.1.json, dev-v1.1.json and vocab.txt",
    files=FILES,
    add_options=add_options,
    writer="benchmarks.bert_squad.writer",
    samples="benchmarks.bert_squad.samples",
    check=prepare.opens("benchmarks.bert_squad.arrays"),
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
