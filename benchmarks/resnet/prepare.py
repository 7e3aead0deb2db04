"""Prepares ResNet's data set: RecordIO files with their index and a passport, or checks a prepared one.

    $ python -m benchmarks.resnet.prepare --to data/resnet                      # the small set
    $ python -m benchmarks.resnet.prepare --from /raw/imagenet --to /data/imagenet
    $ python -m benchmarks.resnet.prepare --verify /data/imagenet

Writes train.rec train.idx val.rec val.idx and, last, dataset.json. Give an interrupted command again and
it goes on. Exit code 0: done; 2: refused, nothing was changed; 1: broke on the way; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import List, NoReturn, Optional

from benchmarks.common import passport as passports
from benchmarks.common.preparing import INTERRUPTED, Problem, Progress, disk_problem, human_bytes

BENCHMARK = "resnet"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, "", f"{self.prog} --help")


def _number(least: int, most: int) -> object:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def get_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="python -m benchmarks.resnet.prepare", description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=Path, metavar="DIR", help="folder to prepare the data set in")
    what.add_argument("--verify", type=Path, metavar="DIR", help="check a prepared data set")
    parser.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="DIR",
        help="class folders, with or without train/ and val/ above them, or the folder with ImageNet's tars; "
        "without it, scikit-learn's digits",
    )
    parser.add_argument("--name", help="name of the data set; default: the folder's, or imagenet, or digits")
    parser.add_argument("--resize", type=_number(8, 8192), metavar="PIXELS", help="reduce the short side")
    parser.add_argument(
        "--quality", type=_number(1, 100), metavar="Q", help="re-encode as JPEG of this quality, 1 to 100"
    )
    parser.add_argument("--workers", type=_number(1, 1024), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skip-corrupt", action="store_true", help="leave corrupt images out")
    parser.add_argument("--trust", action="store_true", help="do not decode images whose bytes are kept")
    parser.add_argument("--seed", type=_number(0, 2**63 - 1), default=0, help="of order and split")
    parser.add_argument(
        "--validation-fraction", type=_fraction, default=0.1, metavar="F", help="when the source has no split"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace another data set in DIR")
    parser.add_argument("--quick", action="store_true", help="verify sizes, counts and end records only")
    parser.add_argument("--progress", choices=("plain", "json"), default="plain")
    return parser


def verify(directory: Path, quick: bool, progress: Progress) -> int:
    """Checks a data folder against its passport and tells every difference."""
    done = 0
    total: Optional[int] = None

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("verify", done, total, done)

    try:
        splits = passports.read(directory).splits.values()
        total = sum(split.records.bytes + split.index.bytes for split in splits)
    except passports.PassportError:
        pass  # verify() tells it
    findings = passports.verify(directory, quick, BENCHMARK, tell)
    if findings:
        return progress.fail(*(Problem(*finding) for finding in findings))
    found = passports.read(directory)
    counts = ", ".join(f"{split.count:,} {name}" for name, split in found.splits.items())
    how = "sizes, counts and end records" if quick else "every byte"
    path = directory / passports.FILE_NAME
    progress.end(path, f"{directory} is whole ({how}): {found.name}, {counts}, {human_bytes(total or 0)}")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the command line and returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    progress = Progress(as_json="--progress json" in words or "--progress=json" in words)
    try:
        args = get_parser().parse_args(argv)
        if args.verify is not None:
            return verify(args.verify, args.quick, progress)
        # Checking needs neither Pillow nor any of the rest.
        from benchmarks.resnet.preparation import prepare

        return prepare(args, progress)
    except Problem as problem:
        return progress.fail(problem)
    except KeyboardInterrupt:
        problem = Problem(
            "interrupted", "", "give the same command again: it goes on where it stopped", INTERRUPTED
        )
        return progress.fail(problem)
    except BrokenPipeError:
        # Whoever followed the progress has gone; what is left to flush has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except OSError as error:
        if error.errno is None:
            raise
        return progress.fail(disk_problem(error, args.to or args.verify))


def _interrupt(number: int, frame: Optional[FrameType]) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # a second one must not disturb the stopping
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
