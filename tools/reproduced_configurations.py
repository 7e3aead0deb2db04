"""Hold every published configuration of a results repository against the systems here, as `encore reproduce` does.

    .venv/bin/python tools/reproduced_configurations.py FOLDER...

FOLDER is a checkout, or a part of one; every folder below it that has config_*.sh is read, and every result folder
``results/SYSTEM/BENCHMARK`` that leads to one. Nothing in it is run.
"""

import collections
import sys
from collections.abc import Iterator
from pathlib import Path

from encore.errors import EncoreError
from encore.lab.submissions.expressions import NoValueError
from encore.lab.submissions.reproduction import Reproduction, reproduce
from encore.lab.submissions.source import open_source


def folders(root: Path) -> Iterator[Path]:
    # Every folder at or below ``root`` with configurations
    yield from sorted({path.parent for path in root.rglob("config_*.sh")})


def results(root: Path) -> Iterator[Path]:
    # Every ``results/SYSTEM/BENCHMARK`` at or below ``root``
    yield from sorted(path for path in root.rglob("results/*/*") if path.is_dir())


def every(folder: Path) -> Iterator[Reproduction | str]:
    # Each configuration of a folder; a text where it is not understood
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
    # One configuration in a line
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


def count_results(roots: list[str]) -> collections.Counter[str]:
    # Print a line for each result folder that leads to no configuration here, or to several; return the counts
    counts: collections.Counter[str] = collections.Counter()
    for folder in (folder for root in roots for folder in results(Path(root))):
        found = list(every(folder))
        read = [each for each in found if not isinstance(each, str)]
        counts["result folders"] += 1
        counts["with one configuration"] += len(read) == 1
        counts["with several"] += len(read) > 1
        counts["equal"] += len(read) == 1 and read[0].equals
        counts["equal to the system that names the result"] += any(
            each.equals and each.nearest is not None and each.nearest.submission == folder.parent.name for each in read
        )
        if len(read) != 1 or not read[0].equals:
            named = ", ".join(each if isinstance(each, str) else line(each) for each in found)
            print(f"result {folder.parent.name}/{folder.name}: {named}")
    return counts


def standing(each: Reproduction) -> dict[str, bool]:
    # What a configuration counts as
    maps = each.implementation is not None
    not_found = "was not found" in each.refused
    return {
        "equal": each.equals,
        "maps, no key missing": each.system is not None and not each.missing,
        "a key without a value": maps and bool(each.missing),
        "refused by the checks": maps and not each.missing and not each.system,
        "trains nothing that is a benchmark here": not each.benchmark,
        "another task under the same name": bool(each.benchmark and not maps and not not_found),
        "program not found": not_found,
        "with a system": each.system is not None,
    }


def main(roots: list[str]) -> None:
    # Print a line for each configuration, then the counts
    counts: collections.Counter[str] = collections.Counter()
    unknown: collections.Counter[str] = collections.Counter()
    found = [each for root in roots for folder in folders(Path(root)) for each in every(folder)]
    counts["configurations"] = len(found)
    for each in found:
        if isinstance(each, str):
            counts["not understood"] += 1
            print(each)
            continue
        counts.update(standing(each))
        sizes = {"keys": each.mapped, "without counterpart": each.known_left, "unknown": each.unknown_left}
        counts.update({name: len(group) for name, group in {**sizes, "notes": each.notes}.items()})
        unknown.update(left.name for left in each.unknown_left)
        print(line(each))
    print(dict(counts))
    print(dict(count_results(roots)))
    print("unknown:", unknown.most_common(140))


if __name__ == "__main__":
    main(sys.argv[1:])
