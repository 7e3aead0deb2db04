"""What SOURCE names: a folder of a results repository, a configuration in it, or a result folder."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import names
from encore.containers import images
from encore.errors import EncoreError
from encore.reproduce import mapping
from encore.reproduce.tree import ArchiveTree, FolderTree, Tree, is_archive

_ROUND = re.compile(r"(?:training_results_|(?<![\w.]))v(\d\.\d)(?:\.\d+)?(?![\w.])")
_CONFIGURATION = re.compile(r"config_(.+)\.sh")
_RESULT = re.compile(r"(?:(.*)/)?results/([^/]+)/([^/]+)")
_BELOW_SUBMITTER = ("benchmarks", "results")
_MOST_SHOWN = 12
_MOST_FOLDERS = 4000


@dataclass(frozen=True, kw_only=True)
class Source:
    """One folder of scripts, with the configurations that are asked for."""

    tree: Tree
    folder: str
    """Of the scripts, below the tree's root."""
    shown: str
    """The same as in the results repository, where that can be seen."""
    round: str
    configurations: tuple[str, ...]
    """Names of the configurations' files in the folder."""
    submission: str = ""
    """Result folder that was given."""

    def read(self, file: str) -> str | None:
        """Return the text of a file in the folder of the scripts."""
        return self.tree.read(f"{self.folder}/{file}" if self.folder else file)


def open_source(path: Path, configuration: str | None, round_name: str | None) -> Source:
    """Return what ``path`` names; EncoreError for a path with nothing in it to reproduce."""
    tree, inside, whole = _open(path)
    submission = ""
    if inside.endswith(".sh"):
        inside, _, name = inside.rpartition("/")
        if tree.read(f"{inside}/{name}" if inside else name) is None:
            raise EncoreError(f"{path} cannot be read", expected="a text file", remedy="name another configuration")
        files = [name]
    else:
        result = _RESULT.fullmatch(inside)
        found = _scripts_of_result(tree, *result.groups()) if result and not _configurations(tree, inside) else None
        if found and result:
            inside, files = found
            submission = result[2]
        else:
            files = _configurations(tree, inside)
    if not files:
        raise _nothing(tree, inside, path)
    if configuration is not None:
        files = [_chosen(configuration, files)]
    shown = _shown(whole, tree, inside)
    return Source(
        tree=tree, folder=inside, shown=shown, configurations=tuple(files), submission=submission,
        round=round_name or _round_of(whole, tree, inside),
    )  # fmt: skip


def name_of(file: str) -> str:
    """Return ``DGXA100`` for ``config_DGXA100.sh``."""
    match = _CONFIGURATION.fullmatch(file)
    return match[1] if match else file.removesuffix(".sh")


def _open(path: Path) -> tuple[Tree, str, str]:
    """Return the tree, the place in it and the whole path for what it tells of the round."""
    whole = str(path.absolute())
    for outer in (path, *path.parents):
        if is_archive(outer):
            tree: Tree = ArchiveTree(outer)
            inside = "" if outer == path else path.relative_to(outer).as_posix()
            top = tree.folders("")
            # GitHub's archives have all in one folder.
            if len(top) == 1 and not tree.files("") and not (tree.files(inside) or tree.folders(inside)):
                inside = f"{top[0]}/{inside}".rstrip("/")
            return tree, inside.rstrip("/"), whole
    if not path.exists():
        raise EncoreError(
            f"{path} does not exist",
            expected="a folder, a config_*.sh or an archive of a results repository",
            remedy="clone https://github.com/mlcommons/training_results_v0.7 and name a folder in it",
        )
    resolved = path.resolve()
    folder = resolved if resolved.is_dir() else resolved.parent
    root = next((each.parent for each in (folder, *folder.parents) if _is_below_submitter(each)), folder)
    return FolderTree(root), resolved.relative_to(root).as_posix().removeprefix("."), whole


def _is_below_submitter(folder: Path) -> bool:
    """Whether a folder is one of those that a submitter's has; links out of the submitter's are not followed."""
    return folder.name in _BELOW_SUBMITTER or (folder.name == "code" and folder.parent.name == "submission")


def _configurations(tree: Tree, folder: str) -> list[str]:
    """Return the names of the configurations, without those that others include."""
    found = [name for name in tree.files(folder) if _CONFIGURATION.fullmatch(name)]
    return [name for name in found if "_common" not in name] or found


def _chosen(wanted: str, files: list[str]) -> str:
    for file in files:
        if wanted in (file, name_of(file)):
            return file
    raise names.unknown("configuration", wanted, [name_of(file) for file in files])


def _nothing(tree: Tree, inside: str, path: Path) -> EncoreError:
    below: list[str] = []
    result = _RESULT.fullmatch(inside)
    waiting = [result[1] or ""] if result else [inside]
    for _ in range(_MOST_FOLDERS):
        if not waiting or len(below) > _MOST_SHOWN:
            break
        folder = waiting.pop(0)
        inner = [f"{folder}/{name}".strip("/") for name in tree.folders(folder)]
        below += [each for each in inner if _configurations(tree, each)]
        waiting += inner
    listed = "\n    ".join(below[:_MOST_SHOWN])
    lacks = "leads to no config_*.sh of its benchmark, machine and number of nodes" if result else "has no config_*.sh"
    return EncoreError(
        f"{path} {lacks}",
        expected="the folder of an implementation, such as NVIDIA/benchmarks/resnet/implementations/mxnet",
        remedy=f"name one of\n    {listed}" if below else "give the folder with the scripts of one benchmark",
    )


def _scripts_of_result(tree: Tree, above: str | None, system: str, benchmark: str) -> tuple[str, list[str]] | None:
    """Return the folder and the configurations of as many nodes as the result's system has, on the same machine."""
    base = f"{above}/" if above else ""
    found = [
        (folder, files)
        for folder in _implementations(tree, base, benchmark)
        if (files := _configurations(tree, folder))
    ]
    of_framework = [each for each in found if each[0].rpartition("/")[2].lower() in system.lower()] or found
    machine = re.match(r"dgx(?:a100|h100|1|2)", system.lower())
    fits = _fits(tree, base, system)
    for folder, files in of_framework:
        on_machine = [file for file in files if not machine or name_of(file).lower().startswith(machine[0])]
        fitting = [file for file in on_machine if fits(_nodes_of(tree, folder, file))]
        if fitting:
            return folder, fitting
    return None


def _implementations(tree: Tree, base: str, benchmark: str) -> list[str]:
    """Return the folders that implement a benchmark: of v0.5 by what they train, since named after the benchmark."""
    tops = [f"{base}{top}/{benchmark}/implementations" for top in ("benchmarks", "benchmark")]
    named = [f"{top}/{name}" for top in tops for name in tree.folders(top)]
    early = [
        f"{base}code/{task}/{name}"
        for task in tree.folders(f"{base}code")
        for name in tree.folders(f"{base}code/{task}")
    ]
    return named + [each for each in early if any(ours == benchmark for ours, _ in mapping.of_folder(each))]


def _fits(tree: Tree, base: str, system: str) -> Callable[[int], bool]:
    """Return whether a number of nodes is that of a result's system."""
    described = _count(_description(tree, f"{base}systems/{system}.json").get("number_of_nodes"))
    named = re.search(r"_n(\d{1,6})_", f"{system}_")
    # v0.5 describes a whole cluster, of which each benchmark took its own part.
    if not described and "_multi_" in system:
        return lambda nodes: nodes > 1
    return lambda nodes: nodes == (described or int(named[1] if named else 1))


def _nodes_of(tree: Tree, folder: str, file: str) -> int:
    match = re.search(r"^\s*(?:export\s+)?DGXNNODES=\"?(\d+)", tree.read(f"{folder}/{file}") or "", re.MULTILINE)
    return int(match[1][:6]) if match else 1


def _description(tree: Tree, path: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(tree.read(path) or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _count(value: object) -> int:
    text = str(value).strip()
    return int(text) if text.isdigit() and len(text) < 7 else 0


def _shown(whole: str, tree: Tree, inside: str) -> str:
    """Return the folder as the repository has it: behind the submitter's name, or behind ``v0.5.0``."""
    root = tree.name.replace("\\", "/")
    path = f"{root}/{inside}" if isinstance(tree, FolderTree) else f"/{inside}"
    early = re.search(r"/(v\d\.\d\.\d/.+)", path)
    if early:
        return early[1]
    parts = path.strip("/").split("/")
    where = next((n for n, part in enumerate(parts) if part in ("benchmarks", "results") and n), None)
    return "/".join(parts[where - 1 :] if where else parts[-3:])


def _round_of(whole: str, tree: Tree, inside: str) -> str:
    """Return the round that the path names, else that of the base image; empty where neither is known."""
    named = _ROUND.findall(f"{whole}/{inside}")
    if named:
        return f"v{named[-1]}"
    dockerfile = tree.read(f"{inside}/Dockerfile" if inside else "Dockerfile") or ""
    releases = {each.release: each.round for each in images.catalogue().submitted}
    return next((found for tag, found in releases.items() if f":{tag}-" in dockerfile), "")
