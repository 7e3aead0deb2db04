"""Prepare ResNet's data set: RecordIO files with their index and a manifest, or check a prepared one.

    $ python -m benchmarks.resnet.prepare -o data/resnet                      # the toy data set
    $ python -m benchmarks.resnet.prepare /raw/imagenet -o /data/imagenet
    $ python -m benchmarks.resnet.prepare --verify /data/imagenet

Writes train.rec train.idx val.rec val.idx and, last, dataset.json. Give an interrupted command again and
it continues. Exit code 0: done; 2: refused, nothing was changed; 1: broke on the way; 130: interrupted.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Dict, List

from benchmarks.common.data import prepare, recordio
from benchmarks.common.data.problem import Problem


def add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--resize", type=prepare.number(8, 8192), metavar="PIXELS", help="reduce the short side")
    add("--quality", type=prepare.number(1, 100), metavar="Q", help="re-encode as JPEG of this quality, 1 to 100")
    add("--skip-corrupt", action="store_true", help="skip corrupt images")
    add("--trust", action="store_true", help="do not decode images whose bytes are kept")
    held_out_help = "held out of each class when the source has no split; default: %(default)s"
    add("--validation-fraction", type=prepare.fraction, default=0.1, metavar="F", help=held_out_help)


def check(directory: Path, manifest: Dict[str, Any]) -> List[Problem]:
    """Check the first and last record of every split."""
    return [problem for split in manifest["splits"].values() for problem in recordio.check(directory, split)]


DATA_SET = prepare.DataSet(
    benchmark="resnet",
    source="class folders, with or without train/ and val/ above them, or the folder with ImageNet's tars",
    files=("train.rec", "train.idx", "val.rec", "val.idx"),
    add_options=add_options,
    writer="benchmarks.resnet.writer",
    samples="benchmarks.resnet.samples",
    check=check,
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
