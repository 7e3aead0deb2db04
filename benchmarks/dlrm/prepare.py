"""Prepares DLRM's data set: Criteo's click logs as blocks of columns with a passport, or checks a prepared one.

    $ python -m benchmarks.dlrm.prepare --to data/dlrm                          # the small set
    $ python -m benchmarks.dlrm.prepare --from /raw/criteo --to /data/criteo    # day_0 ..., or train.txt
    $ python -m benchmarks.dlrm.prepare --verify /data/criteo

Writes train.bin val.bin tables.bin and, last, dataset.json. Give an interrupted command again and it goes on.
Exit code 0: done; 2: refused, nothing was changed; 1: broke on the way; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Callable, List, NoReturn, Optional

from benchmarks.common import file_passport
from benchmarks.common.passport import FILE_NAME
from benchmarks.common.preparing import INTERRUPTED, Problem, Progress, disk_problem

BENCHMARK = "dlrm"
INDEX_LIMIT = 40_000_000
"""As submitted: NVIDIA's v0.7 logs name their data set "40m.limit", and no table has more rows."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, "", f"{self.prog} --help")


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{value} does not lie between 0 and 1")
    return value


def get_parser() -> argparse.ArgumentParser:
    """The command line; ``encore data prepare`` hands its own options over."""
    parser = _Parser(prog="python -m benchmarks.dlrm.prepare", description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=Path, metavar="DIR", help="folder to prepare the data set in")
    what.add_argument("--verify", type=Path, metavar="DIR", help="check a prepared data set")
    parser.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="DIR",
        help="folder of day_0 to day_23, or of train.txt (.csv, .tsv) with or without a labelled test.txt; "
        "without it, made clicks",
    )
    parser.add_argument(
        "--name", help="name of the data set; default: criteo-1tb, the folder's or made-clicks"
    )
    parser.add_argument(
        "--index-limit",
        type=_number(1, 2**31 - 1),
        default=INDEX_LIMIT,
        metavar="N",
        help="categories are taken modulo N; default: %(default)s, as submitted",
    )
    parser.add_argument(
        "--frequency-threshold",
        type=_number(0, 255),
        default=0,
        metavar="T",
        help="values seen less than T times in training share a row; default: 0, as submitted: none do",
    )
    _add_manner(parser)
    return parser


def _add_manner(parser: argparse.ArgumentParser) -> None:
    """Options that do not change what a row becomes."""
    parser.add_argument("--workers", type=_number(1, 1024), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out any number of malformed rows")
    parser.add_argument("--seed", type=_number(0, 2**63 - 1), default=0, help="of the order of the rows")
    parser.add_argument(
        "--validation-fraction",
        type=_fraction,
        metavar="F",
        help="share at the end of a single file that is held out; default: a seventh",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace another data set in DIR")
    parser.add_argument("--quick", action="store_true", help="verify the sizes of the files only")
    parser.add_argument("--progress", choices=("plain", "json"), default="plain")


def verify(directory: Path, quick: bool, progress: Progress) -> int:
    """Check a data folder against its passport and tell every difference."""
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("verify", done, None, done)

    findings = file_passport.verify(directory, quick, BENCHMARK, tell)
    if findings:
        return progress.fail(*(Problem(*finding) for finding in findings))
    how = "sizes" if quick else "every byte"
    progress.end(directory / FILE_NAME, f"{directory} is whole ({how})")
    return 0


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    progress = Progress(as_json="--progress json" in words or "--progress=json" in words)
    try:
        args = get_parser().parse_args(argv)
        if args.verify is not None:
            return verify(args.verify, args.quick, progress)
        # Checking needs no numpy.
        from benchmarks.dlrm.preparation import prepare

        return prepare(args, progress)
    except Problem as problem:
        return progress.fail(problem)
    except KeyboardInterrupt:
        remedy = "give the same command again: it goes on where it stopped"
        return progress.fail(Problem("interrupted", "", remedy, INTERRUPTED))
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
