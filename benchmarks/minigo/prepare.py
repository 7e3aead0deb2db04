"""Prepare Minigo's data set: games and a target model with a manifest, or check a prepared one.

    $ python -m benchmarks.minigo.prepare -o data/minigo                          # the toy data set, 5 x 5
    $ python -m benchmarks.minigo.prepare games/ --board-size 9 --target model.npz -o /data/go-9x9
    $ python -m benchmarks.minigo.prepare --verify /data/go-9x9

Writes moves.npy starts.npy outcomes.npy target.npz and, last, dataset.json. Exit code 0: done; 2: refused, nothing was
changed; 1: failed; 130: interrupted.
"""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.common.data import prepare


def add_options(options: argparse._ArgumentGroup) -> None:
    sizes, text = (5, 9, 13, 19), "games on other boards are left out; default: 5 for the toy data set, else 19"
    options.add_argument("--board-size", type=int, choices=sizes, help=text)
    options.add_argument("--target", type=Path, metavar="FILE", help="target model; default: one without knowledge")
    options.add_argument("--skip-corrupt", action="store_true", help="skip games without a result or with errors")
    options.add_argument("--held-out", type=prepare.fraction, default=0.05, help="fraction of games held out")


DATA_SET = prepare.DataSet(
    benchmark="minigo",
    source="a folder with games in SGF, at any depth",
    files=("moves.npy", "starts.npy", "outcomes.npy", "target.npz"),
    add_options=add_options,
    writer="benchmarks.minigo.writer",
    samples="benchmarks.minigo.samples",
    compares=False,
    check=prepare.opens("benchmarks.minigo.examples"),
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
