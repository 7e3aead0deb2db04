"""Hold every published configuration of a results repository against the systems here, as `encore reproduce` does.

    $ .venv/bin/python -m tools.reproduced_configurations FOLDER...

FOLDER is a checkout, or a part of one; every folder below it that has config_*.sh is read, and every result folder
``results/SYSTEM/BENCHMARK`` that leads to one. Nothing in it is run.
"""

import collections
from collections.abc import Iterator
from pathlib import Path

from encore.errors import EncoreError
from encore.lab.submissions.reproduction import Reproduction, reproduce
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.source import open_source
from tools import Folders, run


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


def line(each: Reproduction | str) -> str:
    if isinstance(each, str):
        return each
    if each.equals and each.nearest:
        standing = f"is {each.nearest.file}"
    elif each.refused:
        standing = f"refused: {each.refused[:140]}"
    else:
        near = each.nearest.file if each.nearest else "none"
        what = ", ".join(f"{d.name} {d.published!r} for {d.ours!r}" for d in each.differences[:6])
        standing = f"near {near}: {len(each.differences)} differ ({what}); missing {list(each.missing)}"
    counts = f"{len(each.mapped)} keys, {len(each.known_left)} without, {len(each.unknown_left)} unknown"
    return f"{each.source.round} {each.source.shown} {each.name}: {counts}; {standing}"


def counts_of(each: Reproduction | str) -> dict[str, int]:
    if isinstance(each, str):
        return {"not understood": 1}
    maps, not_found = each.implementation is not None, "was not found" in each.refused
    return {
        "equal": each.equals,
        "maps, no key missing": each.system is not None and not each.missing,
        "a key without a value": maps and bool(each.missing),
        "refused by the checks": maps and not each.missing and not each.system,
        "trains nothing that is a benchmark here": not each.benchmark,
        "another task under the same name": bool(each.benchmark and not maps and not not_found),
        "program not found": not_found,
        "with a system": each.system is not None,
        "keys": len(each.mapped),
        "without counterpart": len(each.known_left),
        "unknown": len(each.unknown_left),
        "notes": len(each.notes),
    }


def counts_of_result(folder: Path, found: list[Reproduction | str]) -> dict[str, int]:
    read = [each for each in found if not isinstance(each, str)]
    submissions = [each.nearest.submission for each in read if each.equals and each.nearest]
    return {
        "result folders": 1,
        "with one configuration": len(read) == 1,
        "with several": len(read) > 1,
        "equal": len(read) == 1 and read[0].equals,
        "equal to the system that names the result": folder.parent.name in submissions,
    }


def main(roots: Folders) -> None:
    # Print a line for each configuration and for each result folder without one that equals, then the counts
    counts, of_results, unknown = (collections.Counter[str]() for _ in range(3))
    folders = sorted({path.parent for root in roots for path in root.rglob("config_*.sh")})
    for each in (each for folder in folders for each in every(folder)):
        counts.update({"configurations": 1, **counts_of(each)})
        unknown.update(() if isinstance(each, str) else [left.name for left in each.unknown_left])
        print(line(each))
    for folder in sorted(path for root in roots for path in root.rglob("results/*/*") if path.is_dir()):
        found = list(every(folder))
        of_folder = counts_of_result(folder, found)
        of_results.update(of_folder)
        if not of_folder["equal"]:
            print(f"result {folder.parent.name}/{folder.name}: {', '.join(map(line, found))}")
    print(dict(counts))
    print(dict(of_results))
    print("unknown:", unknown.most_common(140))


if __name__ == "__main__":
    run(main, __doc__)
