"""Compare all published configurations of a results repository with Encore's systems, as `encore reproduce` does.

    $ .venv/bin/python -m tools.reproduced_configurations FOLDER...

FOLDER is a checkout or a subfolder. Reads every subfolder with config_*.sh, and every result folder
``results/SYSTEM/BENCHMARK`` that refers to one. Nothing is executed.

For result folders with one configuration, the values of the script are compared with the values that `encore
reproduce` reads from the first log: recovered keys by round and submitter, and the keys that are missing or differ.
"""

import collections
from collections.abc import Iterator
from pathlib import Path

from encore.errors import EncoreError
from encore.lab.submissions.log_options import printed_options
from encore.lab.submissions.reproduction import Reproduction, reproduce, reproduce_log
from encore.lab.submissions.safe_eval import NoValueError
from encore.lab.submissions.source import open_source
from tools import Folders, run


def find_reproductions(folder: Path) -> Iterator[Reproduction | str]:
    # All configurations in a folder; a message for an unreadable configuration
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


def line(reproduction: Reproduction | str) -> str:
    if isinstance(reproduction, str):
        return reproduction
    if reproduction.equals and reproduction.nearest:
        standing = f"is {reproduction.nearest.file}"
    elif reproduction.refused:
        standing = f"refused: {reproduction.refused[:140]}"
    else:
        near = reproduction.nearest.file if reproduction.nearest else "none"
        differences = ", ".join(f"{d.name} {d.published!r} for {d.ours!r}" for d in reproduction.differences[:6])
        standing = (
            f"near {near}: {len(reproduction.differences)} differ ({differences}); missing {list(reproduction.missing)}"
        )
    left = f"{len(reproduction.known_left)} without, {len(reproduction.unknown_left)} unknown"
    counts = f"{len(reproduction.mapped)} keys, {left}"
    return f"{reproduction.source.round} {reproduction.source.shown} {reproduction.name}: {counts}; {standing}"


def counts_of(reproduction: Reproduction | str) -> dict[str, int]:
    if isinstance(reproduction, str):
        return {"not understood": 1}
    maps, not_found = reproduction.implementation is not None, "was not found" in reproduction.refused
    return {
        "equal": reproduction.equals,
        "maps, no key missing": reproduction.system is not None and not reproduction.missing,
        "a key without a value": maps and bool(reproduction.missing),
        "refused by the checks": maps and not reproduction.missing and not reproduction.system,
        "trains nothing that is a benchmark here": not reproduction.benchmark,
        "another task under the same name": bool(reproduction.benchmark and not maps and not not_found),
        "program not found": not_found,
        "with a system": reproduction.system is not None,
        "keys": len(reproduction.mapped),
        "without counterpart": len(reproduction.known_left),
        "unknown": len(reproduction.unknown_left),
        "notes": len(reproduction.notes),
    }


def counts_of_result(folder: Path, reproductions: list[Reproduction | str]) -> dict[str, int]:
    read = [reproduction for reproduction in reproductions if not isinstance(reproduction, str)]
    submissions = [
        reproduction.nearest.submission for reproduction in read if reproduction.equals and reproduction.nearest
    ]
    return {
        "result folders": 1,
        "with one configuration": len(read) == 1,
        "with several": len(read) > 1,
        "equal": len(read) == 1 and read[0].equals,
        "equal to the system that names the result": folder.parent.name in submissions,
    }


def recovery(log: Path, script: Reproduction) -> Iterator[tuple[str, str]]:
    # Keys that the script sets, with "equal", "different", "not in the log", "in the environment" or "no reproduction"
    try:
        mapped = reproduce_log(log, script.source.round, None, None).mapped
    except EncoreError:
        mapped = ()
    values = {entry.key: entry.value for entry in mapped}
    for entry in script.mapped:
        if entry.origin == "command":
            same = values.get(entry.key) == entry.value
            lacks = (
                "not in the log" if any(option.startswith("-") for option in entry.options) else "in the environment"
            )
            outcome = "equal" if same else "different" if entry.key in values else lacks
            yield entry.key, outcome if mapped else "no reproduction"


def print_recovery(scripts: dict[Path, Reproduction]) -> None:
    # Share of the script's keys that the first log of a result has, by submitter and round, as a Markdown table
    outcomes = collections.defaultdict[tuple[str, str], collections.Counter[str]](collections.Counter)
    keys = collections.Counter[tuple[str, str]]()
    for folder, script in scripts.items():
        log = next(iter(sorted(folder.glob("result_*.txt"))), None)
        programs = script.implementation.program if script.implementation else ()
        if log is None:
            continue
        kind = "logs with a configuration" if printed_options(log, programs) else "other logs"
        for key, outcome in recovery(log, script):
            for row in (folder.parents[2].name, kind, "all"):
                outcomes[row, script.source.round][outcome] += 1
            keys[f"{script.benchmark}.{key}", outcome] += 1
    rounds = sorted({round_name for _, round_name in outcomes})
    print(f"| | {' | '.join(rounds)} |\n|---|{'---:|' * len(rounds)}")
    for row in sorted({name for name, _ in outcomes}, key=str.lower):
        cells = [outcomes[row, round_name] for round_name in rounds]
        shares = [f"{cell['equal'] / cell.total():.0%} of {cell.total()}" if cell else "" for cell in cells]
        print(f"| {row} | {' | '.join(shares)} |")
    for kind in ("logs with a configuration", "other logs"):
        print(f"{kind}:", sum((outcomes[kind, round_name] for round_name in rounds), collections.Counter[str]()))
    print("not recovered:", [(*key, count) for key, count in keys.most_common() if key[1] != "equal"])


def main(roots: Folders) -> None:
    # Print a line per configuration, and per result folder without a matching configuration, then the counts
    counts, of_results, unknown = (collections.Counter[str]() for _ in range(3))
    scripts: dict[Path, Reproduction] = {}
    folders = sorted({path.parent for root in roots for path in root.rglob("config_*.sh")})
    for reproduction in (reproduction for folder in folders for reproduction in find_reproductions(folder)):
        counts.update({"configurations": 1, **counts_of(reproduction)})
        unknown.update(
            () if isinstance(reproduction, str) else [unknown_name.name for unknown_name in reproduction.unknown_left]
        )
        print(line(reproduction))
    for folder in sorted(path for root in roots for path in root.rglob("results/*/*") if path.is_dir()):
        reproductions = list(find_reproductions(folder))
        of_folder = counts_of_result(folder, reproductions)
        of_results.update(of_folder)
        if len(reproductions) == 1 and not isinstance(reproductions[0], str):
            scripts[folder] = reproductions[0]
        if not of_folder["equal"]:
            print(f"result {folder.parent.name}/{folder.name}: {', '.join(map(line, reproductions))}")
    print(dict(counts))
    print(dict(of_results))
    print("unknown:", unknown.most_common(140))
    print_recovery(scripts)


if __name__ == "__main__":
    run(main, __doc__)
