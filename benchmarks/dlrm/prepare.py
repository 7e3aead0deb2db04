"""Prepare DLRM's data set: Criteo's click logs as blocks of columns with a manifest, or check a prepared one.

    $ python -m benchmarks.dlrm.prepare -o data/dlrm                          # the toy data set
    $ python -m benchmarks.dlrm.prepare /raw/criteo -o /data/criteo    # day_0 ..., or train.txt
    $ python -m benchmarks.dlrm.prepare --verify /data/criteo

Writes train.bin val.bin tables.bin and, last, dataset.json. Give an interrupted command again and it continues.
Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

import argparse
from functools import partial

from benchmarks.common.data import prepare

# as submitted: the data set in NVIDIA's v0.7 logs is named "40m.limit", and no table is larger
INDEX_LIMIT = 40_000_000


def add_options(options: argparse._ArgumentGroup) -> None:
    """Add options for the encoding of rows and for the held-out rows."""
    add = options.add_argument
    limit = "categories are taken modulo N; default: %(default)s, as submitted"
    add("--index-limit", type=prepare.number(1, 2**31 - 1), default=INDEX_LIMIT, metavar="N", help=limit)
    rare = "values seen less than T times in training share a row; default: 0, as submitted: none do"
    add("--frequency-threshold", type=prepare.number(0, 255), default=0, metavar="T", help=rare)
    add("--skip-corrupt", action="store_true", help="skip malformed rows, however many")
    held_out_help = "share at the end of a single file that is held out; default: a seventh"
    add("--validation-fraction", type=prepare.fraction, metavar="F", help=held_out_help)


DATA_SET = prepare.DataSet(
    benchmark="dlrm",
    source="folder of day_0 to day_23, or of train.txt (.csv, .tsv) with or without a labelled test.txt",
    files=("train.bin", "val.bin", "tables.bin"),
    add_options=add_options,
    writer="benchmarks.dlrm.writer",
    samples="benchmarks.dlrm.samples",
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
