"""What SOURCE names: a folder of a results repository, a configuration in it, or a result folder."""

import contextlib
import itertools
import json
import re
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from encore import names
from encore.containers import images
from encore.errors import EncoreError
from encore.files import is_archive, plain_path, unpacked
from encore.lab.submissions import option_mapping
from encore.results.published.systems import framework_of, release_of
from encore.run import hints

LONGEST_FILE = 1024 * 1024  # Bytes of a text: the longest script of any submission has 40 kB
# Files of an archive that scripts and their configurations are in: no logs, no programs
_TEXTS = re.compile(
    r"^(?!.*/results/)(?:.*/)?(?:[^/.]+|[^/]*Dockerfile[^/]*|[^/]+\.(?:sh|sub|json|flags|conf|cfg|ya?ml|txt))$"
)


class Tree:
    """Files by their path below a root, ``/`` between the parts."""

    def __init__(self, path: Path, *, is_archive: bool = False) -> None:
        self.name = str(path)  # What the tree is in messages
        self.is_archive = is_archive
        # Of an archive the texts are in a folder that ends with this object.
        self._unpacked = ExitStack()
        self._root = (
            self._unpacked.enter_context(unpacked(path, _TEXTS, LONGEST_FILE)) if is_archive else path.resolve()
        )

    def _inside(self, path: str) -> Path | None:
        plain = plain_path(path)
        if plain is None:
            return None
        found = (self._root / plain).resolve()
        return found if found.is_relative_to(self._root) else None

    def read(self, path: str) -> str | None:
        """Return a file's text; None where there is none that may be read. EncoreError if it is too long."""
        found = self._inside(path)
        try:
            # A named pipe or a device would be waited for.
            if found is None or not stat.S_ISREG(found.stat().st_mode):
                return None
            with found.open("rb") as file:
                content = file.read(LONGEST_FILE + 1)
        except (OSError, ValueError):
            return None
        if len(content) > LONGEST_FILE:
            raise EncoreError(
                f"{self.name}/{path} is longer than {LONGEST_FILE:,} bytes",
                expected="a script, a Dockerfile or a description",
            )
        return content.decode("utf-8", errors="replace")

    def _names(self, folder: str, is_wanted: Callable[[Path], bool]) -> list[str]:
        found = self._inside(folder)
        try:
            return sorted(each.name for each in (found.iterdir() if found else ()) if is_wanted(each))
        except OSError:
            return []

    def files(self, folder: str) -> list[str]:
        return self._names(folder, Path.is_file)

    def folders(self, folder: str) -> list[str]:
        return self._names(folder, Path.is_dir)


_ROUND = re.compile(r"(?:training_results_|(?<![\w.]))v(\d\.\d)(?:\.\d+)?(?![\w.])")
_CONFIGURATION = re.compile(r"config_(.+)\.sh")
_LAYOUT = re.compile(r"(?:^|_)0*([1-9]\d{0,3})x0*([1-9]\d?)(?=x|_|$)")  # nodes x GPUs per node
# Names of files that configurations source: common values (one submitter writes comman), mounts, a batch
_INCLUDED = re.compile(r"(?:^|_)comm[oa]n|^(?:mounts|fp8|gbs_\d+)$")
_RESULT = re.compile(r"(?:(.*)/)?results/([^/]+)/([^/]+)")
_SYSTEM = re.compile(r"(?:^|/)results/[^/]+$")
_BELOW_SUBMITTER = ("benchmarks", "results")
_MOST_SHOWN = 12
_MOST_FOLDERS = 4000


@dataclass(frozen=True, kw_only=True)
class Source:
    """One folder of scripts, with the configurations that are asked for."""

    tree: Tree
    folder: str  # Of the scripts, below the tree's root
    shown: str  # The same as in the results repository, where that can be seen
    round: str
    configurations: tuple[str, ...]  # Names of the configurations' files in the folder
    submission: str = ""  # Result folder that was given

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
            raise EncoreError(f"{path} cannot be read", expected="a text file", hint="name another configuration")
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
    shown = _shown(tree, inside)
    return Source(
        tree=tree, folder=inside, shown=shown, configurations=tuple(files), submission=submission,
        round=round_name or _round_of(whole, tree, inside),
    )  # fmt: skip


def name_of(file: str) -> str:
    """Return ``DGXA100`` for ``config_DGXA100.sh``."""
    match = _CONFIGURATION.fullmatch(file)
    return match[1] if match else file.removesuffix(".sh")


def layout_of(name: str) -> tuple[int | None, int | None]:
    """Return nodes and GPUs per node from a configuration's name, such as ``DGXH100_128x8x1``."""
    match = _LAYOUT.search(name)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _open(path: Path) -> tuple[Tree, str, str]:
    # The tree, the place in it and the whole path, which names the round
    whole = str(path.absolute())
    for outer in (path, *path.parents):
        if is_archive(outer):
            tree = Tree(outer, is_archive=True)
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
            hint="git clone https://github.com/mlcommons/training_results_v0.7, and name a folder in it",
        )
    resolved = path.resolve()
    folder = resolved if resolved.is_dir() else resolved.parent
    root = next((each.parent for each in (folder, *folder.parents) if _is_below_submitter(each)), folder)
    return Tree(root), resolved.relative_to(root).as_posix().removeprefix("."), whole


def _is_below_submitter(folder: Path) -> bool:
    # Whether a folder is one of those that a submitter's has; links out of the submitter's are not followed
    return folder.name in _BELOW_SUBMITTER or (folder.name == "code" and folder.parent.name == "submission")


def _configurations(tree: Tree, folder: str) -> list[str]:
    # The names of the configurations, without those that others include
    found = [name for name in tree.files(folder) if _CONFIGURATION.fullmatch(name)]
    return [name for name in found if not _INCLUDED.search(name_of(name))] or found


def _chosen(wanted: str, files: list[str]) -> str:
    for file in files:
        if wanted in (file, name_of(file)):
            return file
    raise names.unknown("configuration", wanted, [name_of(file) for file in files])


def _nothing(tree: Tree, inside: str, path: Path) -> EncoreError:
    # What to do where there is no configuration: folders with some, else where the scripts are
    result, of_system = _RESULT.fullmatch(inside), _SYSTEM.search(inside)
    lacks = "leads to no config_*.sh of its benchmark, machine and number of nodes" if result else "has no config_*.sh"
    base = f"{result[1]}/" if result and result[1] else ""
    folders = _implementations(tree, base, result[3]) if result else []
    if of_system and tree.folders(inside):
        folders = [f"{inside}/{name}" for name in tree.folders(inside)]
        return EncoreError(
            f"{path} is the folder of a system", expected="that of a benchmark in it", hint=_name_one(tree, folders)
        )
    # A folder of a system may be empty: the scripts are next to it.
    tops = [base or inside.partition("/implementations/")[0], *map(str, PurePosixPath(inside).parents)]
    for near in itertools.chain([folders], (_within(tree, top.strip("./")) for top in tops)):
        below = [each for each in near if _configurations(tree, each)]
        scripts = [each for each in near if _scripts(tree, each)]
        if below or scripts:
            break
    if scripts and not below:
        system = result[2] if result else inside.rpartition("/")[2]
        nearest = [_same_name(each.rpartition("/")[2], system) for each in scripts]
        scripts = [each for each, same in zip(scripts, nearest, strict=True) if same == max(nearest)]
        listed = [f"{tree.name}/{each}: {', '.join(_scripts(tree, each)[:4])}" for each in scripts[:_MOST_SHOWN]]
        return EncoreError(
            f"{path} {lacks}: what it was run with is in scripts that Encore does not read",
            expected="config_*.sh, as NVIDIA and those who follow it have them",
            hint="\n    ".join(["read the scripts in", *listed]),
        )
    return EncoreError(
        f"{path} {lacks}",
        expected="the folder of an implementation, such as NVIDIA/benchmarks/resnet/implementations/mxnet",
        hint=_name_one(tree, below) if below else "give the folder with the scripts of one benchmark",
    )


def _within(tree: Tree, top: str) -> list[str]:
    # The folders below one, the nearest first, until there are more with configurations than are shown
    found, waiting, shown = [], [top], 0
    for _ in range(_MOST_FOLDERS):
        if not waiting or shown > _MOST_SHOWN:
            break
        folder = waiting.pop(0)
        inner = [f"{folder}/{name}".strip("/") for name in tree.folders(folder)]
        shown += sum(bool(_configurations(tree, each)) for each in inner)
        found += inner
        waiting += inner
    return found


def _scripts(tree: Tree, folder: str) -> list[str]:
    # The scripts of a folder, those that start a training first
    found = [name for name in tree.files(folder) if name.endswith((".sh", ".sub"))]
    return sorted(found, key=lambda name: (not name.startswith("run"), name))


def _name_one(tree: Tree, folders: list[str]) -> str:
    # A command for each folder, which can be pasted
    listed = [hints.command("reproduce", f"{tree.name}/{each}") for each in folders[:_MOST_SHOWN]]
    return "\n    ".join(["name one of", *listed])


def _scripts_of_result(tree: Tree, above: str | None, system: str, benchmark: str) -> tuple[str, list[str]] | None:
    # The folder and the configurations that lead to a result, those that name its system before the others
    base = f"{above}/" if above else ""
    machine = _Machine(system, tree, f"{base}systems")
    ranked = {
        (folder, file): rank
        for folder in _implementations(tree, base, benchmark)
        for file in _configurations(tree, folder)
        if (rank := machine.rank(tree, folder, file))
    }
    best = [place for place, rank in ranked.items() if rank == max(ranked.values())]
    folders = list(dict.fromkeys(folder for folder, _ in best))
    if len(folders) > 1:
        raise EncoreError(
            f"{system}/{benchmark} may come from any of {len(folders)} folders",
            expected="one whose name, machine, number of nodes and of GPUs fit best",
            hint=_name_one(tree, folders),
        )
    return (folders[0], [file for _, file in best]) if folders else None


def _implementations(tree: Tree, base: str, benchmark: str) -> list[str]:
    # The folders that implement a benchmark: of v0.5 by what they train, since named after the benchmark
    tops = [f"{base}{top}" for top in ("benchmarks", "benchmark")]
    named = [folder for top in tops for folder in _below(tree, f"{top}/{benchmark}", 3)]
    # v2.0 and v2.1 of one submitter have the system above the benchmark.
    above = [f"{top}/implementations" for top in tops]
    named += [f"{top}/{each}/{benchmark}" for top in above for each in tree.folders(top)]
    early = [folder for task in tree.folders(f"{base}code") for folder in _below(tree, f"{base}code/{task}", 1)]
    return named + [each for each in early if any(ours == benchmark for ours, _ in option_mapping.of_folder(each))]


def _below(tree: Tree, folder: str, levels: int) -> list[str]:
    # The folders below one, and those below them
    inner = [f"{folder}/{name}" for name in tree.folders(folder)]
    return inner + [each for one in inner if levels > 1 for each in _below(tree, one, levels - 1)]


class _Machine:
    # The system of a result, by its name and its description

    def __init__(self, system: str, tree: Tree, folder: str) -> None:
        description = _description(tree, f"{folder}/{system}.json")
        self._names = (system, _without_framework(system))
        others = {file.removesuffix(".json") for file in tree.files(folder)} - {system}
        self._others = [_without_framework(each) for each in others]
        self._words = _words(system) | {str(description.get("division"))}
        described = _count(description.get("number_of_nodes"))
        named = re.search(r"_n(\d{1,6})_", f"{system}_")
        self._nodes = described or int(named[1] if named else 1)
        # v0.5 describes a whole cluster, of which each benchmark took its own part.
        self._is_part = not described and "_multi_" in system
        self._gpus = _count(description.get("accelerators_per_node"))
        self._parts = _accelerators(f"{description.get('accelerator_model_name', '')} {system}")
        self._box = re.match(r"dgx(?:a100|h100|1|2)", system.lower())

    def rank(self, tree: Tree, folder: str, file: str) -> tuple[int, ...] | None:
        # How well a configuration fits, by its folders, name and text; None for one of another machine
        folders, name, text = folder.split("/")[-3:], name_of(file), _text_with_includes(tree, folder, file)
        of_folder = max(self._same(each) for each in folders)
        release = release_of(self._names[0])
        has_release = bool(release) and f":{release}" in (tree.read(f"{folder}/Dockerfile") or "")
        shared = (len(self._words & _words(" ".join(folders))), has_release, -folder.count("/"))
        if _plain(name) in map(_plain, self._names):
            return _EQUAL + 1, name in self._names, of_folder, *shared
        own = _MEASURES.sub("", name)
        of_name = self._same(own)
        in_front, behind = _IN_FRONT.match(name), re.search(r"_(\d{1,4})x\d+x", name)
        nodes = int(in_front[1]) if in_front else _number(text, "NODES") or int(behind[1] if behind else 1)
        gpus, parts = _number(text, "GPU"), _accelerators(name)
        fits = not (gpus and self._gpus and gpus != self._gpus) and all(
            not one or not other or one & other for one, other in zip(parts, self._parts, strict=True)
        )
        if (
            (nodes == 1 if self._is_part else nodes != self._nodes)
            or (self._box and not name.lower().startswith(self._box[0]))
            # A folder of the system's own name may have the configuration of the machine that its scripts are from.
            or (of_folder < _EQUAL and not fits)
            or (not of_name and self._is_anothers(own))
            or (not of_folder and not of_name and any(map(self._is_anothers, folders)))
        ):
            return None
        return of_folder, fits, of_name, *shared

    def _same(self, name: str) -> int:
        return max(_same_name(name, each) for each in self._names)

    def _is_anothers(self, name: str) -> bool:
        # Whether it is the name of another system; NVIDIA's are in everybody's scripts
        return not re.match(r"[dh]gx|gb\d", name.lower()) and any(_same_name(name, each) for each in self._others)


_EQUAL = 2
_ACCELERATOR = re.compile(r"gb[23]00|[bh][123]00|[vpa]100|a[34]0|l40?|h20|mi\d{3}")
_IN_FRONT = re.compile(rf"(\d{{1,4}})x(?=[A-Za-z])(?!{_ACCELERATOR.pattern})", re.IGNORECASE)
# What a name has of numbers: nodes in front; nodes x GPUs x batch behind
_MEASURES = re.compile(rf"^{_IN_FRONT.pattern}|[_-]\d+x\d+x.*$", re.IGNORECASE)
_MEMORY = re.compile(r"(\d{2,3})gb?(?![a-z0-9])")


def _without_framework(system: str) -> str:
    return re.sub(rf"[_.-](?:ngc[\d.]+_)?{framework_of(system)}$", "", system, flags=re.IGNORECASE)


def _plain(name: str) -> str:
    # A name without case and separators; an x is often one
    return re.sub(r"[^a-wyz0-9+]", "", name.lower())


def _same_name(name: str, system: str) -> int:
    # 2 for the name of a system, 1 for the beginning of one or one that begins with it, else 0
    short, long = sorted((name, _MEASURES.sub("", system)), key=lambda each: len(_plain(each)))
    if _plain(short) == _plain(long) or _words(short) == _words(long):
        return _EQUAL
    parts = re.split(r"[^A-Za-z0-9+]+|x(?=\d)", long)
    begins = bool(_plain(short)) and _plain(short) in itertools.accumulate(map(_plain, parts))
    return int(begins or (bool(_words(name)) and _words(name) <= _words(_MEASURES.sub("", system))))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _accelerators(text: str) -> tuple[set[str], set[str]]:
    # The accelerators that a text names, and the sizes of their memory
    return set(_ACCELERATOR.findall(text.lower())), set(_MEMORY.findall(text.lower()))


def _text_with_includes(tree: Tree, folder: str, file: str) -> str:
    # A configuration behind the files of its folder that it sources
    text = tree.read(f"{folder}/{file}") or ""
    included = re.findall(r"^\s*(?:source|\.)\s.*?([\w.+-]+\.sh)", text, re.MULTILINE)
    return "\n".join([*(tree.read(f"{folder}/{name}") or "" for name in included if name != file), text])


def _number(text: str, what: str) -> int:
    # The last number that a script gives a variable such as DGXNNODES; 0 where it gives none
    pattern = rf"^\s*(?:export\s+)?DGX\w*{what}S?=\"?(?:\$\{{\w+:[-=])?\"?(\d{{1,6}})\b"
    found = re.findall(pattern, text, re.MULTILINE)
    return int(found[-1]) if found else 0


def _description(tree: Tree, path: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(tree.read(path) or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _count(value: object) -> int:
    text = str(value).strip()
    return int(text) if text.isdigit() and len(text) < 7 else 0


def _shown(tree: Tree, inside: str) -> str:
    # The folder as the repository has it: behind the submitter's name, or behind ``v0.5.0``
    root = tree.name.replace("\\", "/")
    path = f"/{inside}" if tree.is_archive else f"{root}/{inside}"
    early = re.search(r"/(v\d\.\d\.\d/.+)", path)
    if early:
        return early[1]
    parts = path.strip("/").split("/")
    where = next((n for n, part in enumerate(parts) if part in ("benchmarks", "results") and n), None)
    return "/".join(parts[where - 1 :] if where else parts[-3:])


def _round_of(whole: str, tree: Tree, inside: str) -> str:
    # The round that the path names, else that of the base image; empty where neither is known
    named = _ROUND.findall(f"{whole}/{inside}")
    if named:
        return f"v{named[-1]}"
    dockerfile = tree.read(f"{inside}/Dockerfile" if inside else "Dockerfile") or ""
    releases = {each.release: each.round for each in images.catalogue().submitted}
    return next((found for tag, found in releases.items() if f":{tag}-" in dockerfile), "")
