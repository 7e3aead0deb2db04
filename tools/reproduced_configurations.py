"""Hold every published configuration of a results repository against the systems here, as `encore reproduce` does.

    .venv/bin/python tools/reproduced_configurations.py FOLDER...

FOLDER is a checkout or archive, or a part of one; every folder below it that has config_*.sh is read. Nothing in
it is run.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from pathlib import Path

from encore.errors import EncoreError
from encore.reproduce.expressions import NoValueError
from encore.reproduce.reproduction import Reproduction, reproduce
from encore.reproduce.source import open_source


def folders(root: Path) -> Iterator[Path]:
    """Every folder at or below ``root`` with configurations."""
    yield from sorted({path.parent for path in root.rglob("config_*.sh")})


def every(folder: Path) -> Iterator[Reproduction | str]:
    """Each configuration of a folder; a text where it is not understood."""
    try:
        source = open_source(folder, None, None)
    except EncoreError as error:
        yield f"{folder}: {error.found}"
        return
    for file in source.configurations:
        try:
            yield reproduce(source, file)
        except NoValueError as error:
            yield f"{folder}/{file}: {error}"


def line(each: Reproduction) -> str:
    """One configuration in a line."""
    if each.equals and each.nearest and each.system:
        if each.system.environment != each.nearest.environment:
            print("environment by file:", each.system.environment, each.nearest.environment)
        standing = f"is {each.nearest.file}"
    elif each.refused:
        standing = f"refused: {each.refused[:140]}"
    else:
        near = each.nearest.file if each.nearest else "none"
        what = ", ".join(f"{d.name} {d.published!r} for {d.ours!r}" for d in each.differences[:6])
        standing = f"near {near}: {len(each.differences)} differ ({what}); missing {list(each.missing)}"
    counts = f"{len(each.mapped)} keys, {len(each.known_left)} without, {len(each.unknown_left)} unknown"
    return f"{each.source.round} {each.source.shown} {each.name}: {counts}; {standing}"


def main(roots: list[str]) -> None:
    """Print a line for each configuration, then the counts."""
    counts: collections.Counter[str] = collections.Counter()
    unknown: collections.Counter[str] = collections.Counter()
    for folder in (folder for root in roots for folder in folders(Path(root))):
        for each in every(folder):
            counts["configurations"] += 1
            if isinstance(each, str):
                counts["not understood"] += 1
                print(each)
                continue
            counts["equal"] += each.equals
            counts["with a system"] += each.system is not None
            counts["keys"] += len(each.mapped)
            counts["without counterpart"] += len(each.known_left)
            counts["unknown"] += len(each.unknown_left)
            counts["notes"] += len(each.notes)
            unknown.update(left.name for left in each.unknown_left)
            print(line(each))
    print(dict(counts))
    print("unknown:", unknown.most_common(140))


if __name__ == "__main__":
    main(sys.argv[1:])
