"""Resolve the SOURCE argument: a folder in a results repository, a configuration in it, or a result folder."""

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

from encore.containers import images
from encore.errors import EncoreError, unknown_name
from encore.files import is_archive, plain_path, unpacked
from encore.lab.submissions import option_mapping
from encore.results.published.systems import framework_of, release_of
from encore.run import hints

LONGEST_FILE = 1024 * 1024  # Maximum bytes per text file: the longest submitted script has 40 kB
# Archive members with scripts and configurations: no logs or programs
_TEXTS = re.compile(
    r"^(?!.*/results/)(?:.*/)?(?:[^/.]+|[^/]*Dockerfile[^/]*|[^/]+\.(?:sh|sub|json|flags|conf|cfg|ya?ml|txt))$"
)


class Tree:
    """Files by path below a root, ``/`` as separator."""

    def __init__(self, path: Path, *, is_archive: bool = False) -> None:
        self.name = str(path)  # Name of the tree in messages
        self.is_archive = is_archive
        # Temporary folder with texts from an archive; deleted with this object.
        self._unpacked = ExitStack()
        self._root = (
            self._unpacked.enter_context(unpacked(path, _TEXTS, LONGEST_FILE)) if is_archive else path.resolve()
        )

    def _resolve(self, path: str) -> Path | None:
        plain = plain_path(path)
        if plain is None:
            return None
        target = (self._root / plain).resolve()
        return target if target.is_relative_to(self._root) else None

    def read(self, path: str) -> str | None:
        """Return the file's text; None if it does not exist or must not be read. EncoreError above the size limit."""
        target = self._resolve(path)
        try:
            # A named pipe or a device would be waited for.
            if target is None or not stat.S_ISREG(target.stat().st_mode):
                return None
            with target.open("rb") as file:
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
        directory = self._resolve(folder)
        try:
            return sorted(path.name for path in (directory.iterdir() if directory else ()) if is_wanted(path))
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
_BELOW_SUBMITTER = ("benchmarks", "benchmark", "results")
_MOST_SHOWN = 12
_MOST_FOLDERS = 4000


@dataclass(frozen=True, kw_only=True)
class Source:
    """Folder of scripts, with the selected configurations."""

    tree: Tree
    folder: str  # Of the scripts, below the tree's root
    shown: str  # The same as in the results repository, where that can be seen
    round: str
    configurations: tuple[str, ...]  # Names of the configurations' files in the folder
    submission: str = ""  # Result folder that was given

    def read(self, file: str) -> str | None:
        """Return the file's text in the script folder."""
        return self.tree.read(f"{self.folder}/{file}" if self.folder else file)


def open_source(path: Path, configuration: str | None, round_name: str | None) -> Source:
    """Return the source at ``path``; EncoreError without reproducible content."""
    tree, subpath, full_path = _open(path)
    submission = ""
    if subpath.endswith(".sh"):
        subpath, _, name = subpath.rpartition("/")
        if tree.read(f"{subpath}/{name}" if subpath else name) is None:
            raise EncoreError(f"{path} cannot be read", expected="a text file", hint="name another configuration")
        files = [name]
    else:
        files, result = _configurations(tree, subpath), _RESULT.fullmatch(subpath)
        if result and not files and (scripts := _scripts_of_result(tree, *result.groups())):
            (subpath, files), submission = scripts, result[2]
    if not files:
        raise _missing_configuration(tree, subpath, path)
    if configuration is not None:
        named = {name: file for file in reversed(files) for name in (configuration_name(file), file)}
        if configuration not in named:
            raise unknown_name("configuration", configuration, map(configuration_name, files))
        files = [named[configuration]]
    return Source(
        tree=tree, folder=subpath, shown=_display_path(tree, subpath), configurations=tuple(files),
        submission=submission, round=round_name or _round_of(full_path, tree, subpath),
    )  # fmt: skip


def configuration_name(file: str) -> str:
    """Return ``DGXA100`` for ``config_DGXA100.sh``."""
    match = _CONFIGURATION.fullmatch(file)
    return match[1] if match else file.removesuffix(".sh")


def parse_layout(name: str) -> tuple[int | None, int | None]:
    """Return nodes and GPUs per node from a configuration's name, such as ``DGXH100_128x8x1``."""
    match = _LAYOUT.search(name)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _open(path: Path) -> tuple[Tree, str, str]:
    # Tree, subpath in it, and full path, which names the round
    full_path = str(path.absolute())
    for outer in (path, *path.parents):
        if is_archive(outer):
            tree = Tree(outer, is_archive=True)
            subpath = "" if outer == path else path.relative_to(outer).as_posix()
            top = tree.folders("")
            # GitHub's archives have all in one folder.
            if len(top) == 1 and not tree.files("") and not (tree.files(subpath) or tree.folders(subpath)):
                subpath = f"{top[0]}/{subpath}".rstrip("/")
            return tree, subpath.rstrip("/"), full_path
    if not path.exists():
        raise EncoreError(
            f"{path} does not exist",
            expected="a folder, config_*.sh or archive from a results repository",
            hint="git clone https://github.com/mlcommons/training_results_v0.7, and pass a folder in it",
        )
    resolved = path.resolve()
    folder = resolved if resolved.is_dir() else resolved.parent
    # Links out of the submitter's tree are not followed.
    below_submitter = (
        ancestor
        for ancestor in (folder, *folder.parents)
        if ancestor.name in _BELOW_SUBMITTER or ancestor.parts[-2:] == ("submission", "code")
    )
    root = next((ancestor.parent for ancestor in below_submitter), folder)
    return Tree(root), resolved.relative_to(root).as_posix().removeprefix("."), full_path


def _configurations(tree: Tree, folder: str) -> list[str]:
    # Names of configurations that are not included by other files
    names = [name for name in tree.files(folder) if _CONFIGURATION.fullmatch(name)]
    return [name for name in names if not _INCLUDED.search(configuration_name(name))] or names


def _missing_configuration(tree: Tree, subpath: str, path: Path) -> EncoreError:
    # Error for a folder without configurations: suggests folders with configurations, otherwise with scripts
    result, of_system = _RESULT.fullmatch(subpath), _SYSTEM.search(subpath)
    lacks = "leads to no config_*.sh of its benchmark, machine and number of nodes" if result else "has no config_*.sh"
    base = f"{result[1]}/" if result and result[1] else ""
    folders = _implementations(tree, base, result[3]) if result else []
    if of_system and tree.folders(subpath):
        folders = [f"{subpath}/{name}" for name in tree.folders(subpath)]
        return EncoreError(
            f"{path} is the folder of a system",
            expected="the folder of a benchmark in it",
            hint=_suggest_commands(tree, folders),
        )
    # System folders may be empty; the scripts are then in a sibling folder.
    tops = [base or subpath.partition("/implementations/")[0], *map(str, PurePosixPath(subpath).parents)]
    for near in itertools.chain([folders], (_find_configurations(tree, top.strip("./")) for top in tops)):
        below = [directory for directory in near if _configurations(tree, directory)]
        scripts = [directory for directory in near if _scripts(tree, directory)]
        if below or scripts:
            break
    if scripts and not below:
        system = result[2] if result else subpath.rpartition("/")[2]
        nearest = [_same_name(directory.rpartition("/")[2], system) for directory in scripts]
        scripts = [directory for directory, same in zip(scripts, nearest, strict=True) if same == max(nearest)]
        listed = [
            f"{tree.name}/{directory}: {', '.join(_scripts(tree, directory)[:4])}"
            for directory in scripts[:_MOST_SHOWN]
        ]
        return EncoreError(
            f"{path} {lacks}: its settings are in scripts that Encore does not read",
            expected="config_*.sh, as in NVIDIA's submissions",
            hint="\n    ".join(["read the scripts in", *listed]),
        )
    return EncoreError(
        f"{path} {lacks}",
        expected="the folder of an implementation, such as NVIDIA/benchmarks/resnet/implementations/mxnet",
        hint=_suggest_commands(tree, below) if below else "use the script folder of a benchmark",
    )


def _find_configurations(tree: Tree, top: str) -> list[str]:
    # The folders below one, the nearest first, until there are more with configurations than are shown
    matches, waiting, count = [], [top], 0
    for _ in range(_MOST_FOLDERS):
        if not waiting or count > _MOST_SHOWN:
            break
        folder = waiting.pop(0)
        inner = [f"{folder}/{name}".strip("/") for name in tree.folders(folder)]
        count += sum(bool(_configurations(tree, directory)) for directory in inner)
        matches += inner
        waiting += inner
    return matches


def _scripts(tree: Tree, folder: str) -> list[str]:
    # Scripts in the folder; scripts that start a training first
    names = [name for name in tree.files(folder) if name.endswith((".sh", ".sub"))]
    return sorted(names, key=lambda name: (not name.startswith("run"), name))


def _suggest_commands(tree: Tree, folders: list[str]) -> str:
    # A command per folder, to be pasted
    listed = [hints.command("reproduce", f"{tree.name}/{directory}") for directory in folders[:_MOST_SHOWN]]
    return "\n    ".join(["name one of", *listed])


def _scripts_of_result(tree: Tree, above: str | None, system: str, benchmark: str) -> tuple[str, list[str]] | None:
    # Script folder and configurations for a result; configurations that name the system first
    base = f"{above}/" if above else ""
    machine = _Machine(system, tree, f"{base}systems")
    ranked = {
        (folder, file): rank
        for folder in _implementations(tree, base, benchmark)
        for file in _configurations(tree, folder)
        if (rank := machine.rank(tree, folder, file))
    }
    best = [directory for directory, rank in ranked.items() if rank == max(ranked.values())]
    folders = list(dict.fromkeys(folder for folder, _ in best))
    if len(folders) > 1:
        raise EncoreError(
            f"{system}/{benchmark} may come from any of {len(folders)} folders",
            expected="the best match for name, machine, nodes and GPUs",
            hint=_suggest_commands(tree, folders),
        )
    return (folders[0], [file for _, file in best]) if folders else None


def _implementations(tree: Tree, base: str, benchmark: str) -> list[str]:
    # Folders that implement a benchmark: named after the task in v0.5, later after the benchmark
    tops = [f"{base}{top}" for top in ("benchmarks", "benchmark")]
    # Some submitters have another name for the benchmark, such as ft-llm.
    tasks = [f"{top}/{name}" for top in tops for name in dict.fromkeys([benchmark, *tree.folders(top)])]
    folders = [
        folder
        for task in tasks
        if task.endswith(f"/{benchmark}") or _implements(f"{task}/implementations/x", benchmark)
        for folder in _subfolders(tree, task, 3)
    ]
    # In v2.0 and v2.1 a submitter has the system above the benchmark.
    above = [f"{top}/implementations" for top in tops]
    folders += [f"{top}/{name}/{benchmark}" for top in above for name in tree.folders(top)]
    early = [folder for task in tree.folders(f"{base}code") for folder in _subfolders(tree, f"{base}code/{task}", 1)]
    return folders + [name for name in early if _implements(name, benchmark)]


def _implements(folder: str, benchmark: str) -> bool:
    return any(name == benchmark for name, _ in option_mapping.find_implementations(folder))


def _subfolders(tree: Tree, folder: str, levels: int) -> list[str]:
    # Subfolders down to a depth of ``levels``
    inner = [f"{folder}/{name}" for name in tree.folders(folder)]
    return inner + [
        directory for folder_ in inner if levels > 1 for directory in _subfolders(tree, folder_, levels - 1)
    ]


class _Machine:
    # Result's system, by name and description

    def __init__(self, system: str, tree: Tree, folder: str) -> None:
        description = _description(tree, f"{folder}/{system}.json")
        self._names = (system, _without_framework(system))
        other_systems = {file.removesuffix(".json") for file in tree.files(folder)} - {system}
        self._others = [_without_framework(other) for other in other_systems]
        self._name_parts = _name_parts(system) | {str(description.get("division"))}
        described = _count(description.get("number_of_nodes"))
        node_match = re.search(r"_n(\d{1,6})_", f"{system}_")
        self._nodes = described or int(node_match[1] if node_match else 1)
        # v0.5 describes the full cluster; benchmarks used some of the nodes.
        self._is_part = not described and "_multi_" in system
        self._gpus = _count(description.get("accelerators_per_node"))
        self._parts = _accelerators(f"{description.get('accelerator_model_name', '')} {system}")
        self._box = re.match(r"dgx(?:a100|h100|1|2)", system.lower())

    def rank(self, tree: Tree, folder: str, file: str) -> tuple[int, ...] | None:
        # Configuration match score by folders, name and text; None for a different machine
        folders, name, text = folder.split("/")[-3:], configuration_name(file), _text_with_includes(tree, folder, file)
        of_folder = max(self._match_system(directory) for directory in folders)
        release = release_of(self._names[0])
        has_release = bool(release) and f":{release}" in (tree.read(f"{folder}/Dockerfile") or "")
        shared = (len(self._name_parts & _name_parts(" ".join(folders))), has_release, -folder.count("/"))
        if _plain(name) in map(_plain, self._names):
            return _EQUAL + 1, name in self._names, of_folder, *shared
        own_name = _MEASURES.sub("", name)
        of_name = self._match_system(own_name)
        in_front, suffix = _IN_FRONT.match(name), re.search(r"_(\d{1,4})x\d+x", name)
        nodes = int(in_front[1]) if in_front else _number(text, "NODES") or int(suffix[1] if suffix else 1)
        gpus, parts = _number(text, "GPU"), _accelerators(name)
        fits = not (gpus and self._gpus and gpus != self._gpus) and all(
            not own_words or not other or own_words & other for own_words, other in zip(parts, self._parts, strict=True)
        )
        if (
            (nodes == 1 if self._is_part else nodes != self._nodes)
            or (self._box and not name.lower().startswith(self._box[0]))
            # A folder named after the system may have the configuration of the machine that the scripts come from.
            or (of_folder < _EQUAL and not fits)
            or (not of_name and self._is_other_system(own_name))
            or (not of_folder and not of_name and any(map(self._is_other_system, folders)))
        ):
            return None
        return of_folder, fits, of_name, *shared

    def _match_system(self, name: str) -> int:
        return max(_same_name(name, candidate) for candidate in self._names)

    def _is_other_system(self, name: str) -> bool:
        # Whether the name belongs to a different system; NVIDIA's are in all submitters' scripts
        return not re.match(r"[dh]gx|gb\d", name.lower()) and any(_same_name(name, other) for other in self._others)


_EQUAL = 2
_ACCELERATOR = re.compile(r"gb[23]00|[bh][123]00|[vpa]100|a[34]0|l40?|h20|mi\d{3}")
_IN_FRONT = re.compile(rf"(\d{{1,4}})x(?=[A-Za-z])(?!{_ACCELERATOR.pattern})", re.IGNORECASE)
# Numeric name parts: leading nodes; trailing nodes x GPUs x batch
_MEASURES = re.compile(rf"^{_IN_FRONT.pattern}|[_-]\d+x\d+x.*$", re.IGNORECASE)
_MEMORY = re.compile(r"(\d{2,3})gb?(?![a-z0-9])")


def _without_framework(system: str) -> str:
    return re.sub(rf"[_.-](?:ngc[\d.]+_)?{framework_of(system)}$", "", system, flags=re.IGNORECASE)


def _plain(name: str) -> str:
    # A name without case and separators; an x is often one
    return re.sub(r"[^a-wyz0-9+]", "", name.lower())


def _same_name(name: str, system: str) -> int:
    # 2 for a system name, 1 for a prefix in either direction, otherwise 0
    short, long = sorted((name, _MEASURES.sub("", system)), key=lambda candidate: len(_plain(candidate)))
    if _plain(short) == _plain(long) or _name_parts(short) == _name_parts(long):
        return _EQUAL
    parts = re.split(r"[^A-Za-z0-9+]+|x(?=\d)", long)
    begins = bool(_plain(short)) and _plain(short) in itertools.accumulate(map(_plain, parts))
    return int(begins or (bool(_name_parts(name)) and _name_parts(name) <= _name_parts(_MEASURES.sub("", system))))


def _name_parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _accelerators(text: str) -> tuple[set[str], set[str]]:
    # Accelerators and memory sizes in a text
    return set(_ACCELERATOR.findall(text.lower())), set(_MEMORY.findall(text.lower()))


def _text_with_includes(tree: Tree, folder: str, file: str) -> str:
    # Configuration text, preceded by the files that it sources
    text = tree.read(f"{folder}/{file}") or ""
    included = re.findall(r"^\s*(?:source|\.)\s.*?([\w.+-]+\.sh)", text, re.MULTILINE)
    return "\n".join([*(tree.read(f"{folder}/{name}") or "" for name in included if name != file), text])


def _number(text: str, pattern_name: str) -> int:
    # Last number that a script assigns to a variable such as DGXNNODES; 0 if none
    pattern = rf"^\s*(?:export\s+)?DGX\w*{pattern_name}S?=\"?(?:\$\{{\w+:[-=])?\"?(\d{{1,6}})\b"
    numbers = re.findall(pattern, text, re.MULTILINE)
    return int(numbers[-1]) if numbers else 0


def _description(tree: Tree, path: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        description = json.loads(tree.read(path) or "{}")
        return description if isinstance(description, dict) else {}
    return {}


def _count(value: object) -> int:
    text = str(value).strip()
    return int(text) if text.isdigit() and len(text) < 7 else 0


def _display_path(tree: Tree, subpath: str) -> str:
    # Folder relative to the repository: below the submitter's parent, or below ``v0.5.0``
    root = tree.name.replace("\\", "/")
    path = f"/{subpath}" if tree.is_archive else f"{root}/{subpath}"
    if early := re.search(r"/(v\d\.\d\.\d/.+)", path):
        return early[1]
    parts = path.strip("/").split("/")
    index = next((n for n, part in enumerate(parts) if part in _BELOW_SUBMITTER and n), None)
    return "/".join(parts[index - 1 :] if index else parts[-3:])


def _round_of(full_path: str, tree: Tree, subpath: str) -> str:
    # Round in the path, otherwise from the base image; empty if unknown
    if rounds := _ROUND.findall(f"{full_path}/{subpath}"):
        return f"v{rounds[-1]}"
    dockerfile = tree.read(f"{subpath}/Dockerfile" if subpath else "Dockerfile") or ""
    releases = {release.release: release.round for release in images.catalogue().submitted}
    return next((round_name for tag, round_name in releases.items() if f":{tag}-" in dockerfile), "")
