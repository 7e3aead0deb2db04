"""Prepares NCF's data set: arrays with a passport, or checks a prepared one.

    $ python -m benchmarks.ncf.prepare --to data/ncf                              # the small set
    $ python -m benchmarks.ncf.prepare --from ml-20m.zip --to /data/ml-20m
    $ python -m benchmarks.ncf.prepare --verify /data/ml-20m

Writes train_users.npy train_items.npy test_items.npy test_negatives.npy and, last, dataset.json. Exit code 0:
done; 2: refused, nothing was changed; 1: broke on the way; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import List, NoReturn, Optional

from benchmarks.common.preparing import INTERRUPTED, Problem, Progress, disk_problem
from benchmarks.ncf.preparation import prepare, verify

NOT_FOR_RATINGS = ("resize", "quality", "validation_fraction", "skip_corrupt", "trust")
"""Options of the host's command that make sense for images only."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, "", f"{self.prog} --help")


def get_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="python -m benchmarks.ncf.prepare", description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", type=Path, metavar="DIR", help="folder to prepare the data set in")
    what.add_argument("--verify", type=Path, metavar="DIR", help="check a prepared data set")
    parser.add_argument(
        "--from",
        dest="origin",
        type=Path,
        metavar="PATH",
        help="a MovieLens release (zip, folder, or file of ratings), or the folder of the NCF paper's files; "
        "without it, made-up users",
    )
    parser.add_argument("--name", help="name of the data set; default: the release's")
    parser.add_argument("--seed", type=int, default=0, help="of the negatives that are ranked against")
    parser.add_argument("--workers", type=int, help="one process is enough: accepted and not used")
    parser.add_argument("--overwrite", action="store_true", help="replace another data set in DIR")
    parser.add_argument("--quick", action="store_true", help="verify sizes only")
    parser.add_argument("--progress", choices=("plain", "json"), default="plain")
    for option in NOT_FOR_RATINGS:
        flag = "--" + option.replace("_", "-")
        if option in ("skip_corrupt", "trust"):
            parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, help=argparse.SUPPRESS)
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the command line and returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    progress = Progress(as_json="--progress json" in words or "--progress=json" in words)
    try:
        args = get_parser().parse_args(argv)
        for option in NOT_FOR_RATINGS:
            if getattr(args, option):
                name = "--" + option.replace("_", "-")
                raise Problem(f"{name} is for images", "options of ratings", f"leave {name} out")
        if args.verify is not None:
            return verify(args.verify, args.quick, progress)
        return prepare(args, progress)
    except Problem as problem:
        return progress.fail(problem)
    except KeyboardInterrupt:
        return progress.fail(Problem("interrupted", "", "give the same command again", INTERRUPTED))
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
