"""Merge submitter trees into one tree, as in a round's repository, and report conflicts.

    SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt ...    a set is in a single tree, or identical in all
    SUBMITTER/systems/SYSTEM.json                          a single system description, with its results
    SUBMITTER/benchmarks/...                               files of multiple trees

No files are written in case of conflicts. Identical files in two trees do not conflict. Trees are untrusted: links
are not followed, and special file names are rejected.
"""

import filecmp
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from encore.errors import EncoreError
from encore.lab.submissions.archive import submission_trees
from encore.results.format import count_of
from encore.results.table import grouped

_NOT_OF_THE_TREE = frozenset({".git"})
_Files = dict[PurePosixPath, Path]  # Files by path in the merged tree
_SET_DEPTH, _CODE_DEPTH = 4, 5  # SUBMITTER/results/SYSTEM/BENCHMARK, SUBMITTER/benchmarks/B/implementations/SYSTEM


@dataclass(frozen=True)
class Collision:
    """Conflicting path in the merged tree."""

    place: str
    why: str
    trees: tuple[str, ...]
    hint: str


@dataclass(frozen=True)
class Merged:
    """Merge result; ``output`` is None in case of conflicts."""

    trees: int
    files: int
    collisions: tuple[Collision, ...]
    output: Path | None


# Submitter tree, and rejected files.
@dataclass(frozen=True)
class _Tree:
    folder: Path
    files: _Files = field(default_factory=dict)
    refused: list[Collision] = field(default_factory=list)

    @property
    def systems(self) -> frozenset[tuple[str, str]]:
        """Systems that it describes, as submitter and system."""
        parts = (path.parts for path in self.files)
        return frozenset(
            (components[0], components[2].removesuffix(".json"))
            for components in parts
            if len(components) == _SET_DEPTH - 1 and components[1] == "systems" and components[2].endswith(".json")
        )

    @property
    def referenced_systems(self) -> frozenset[tuple[str, str]]:
        """Systems with results or code in the tree."""
        depths = {"results": (2, _SET_DEPTH), "benchmarks": (_CODE_DEPTH - 1, _CODE_DEPTH)}
        parts = (path.parts for path in self.files)
        units = ((components, *depths.get(components[1], (0, len(components)))) for components in parts)
        return frozenset(
            (components[0], components[index]) for components, index, depth in units if len(components) > depth
        )


def merge_trees(roots: Sequence[Path], output: Path) -> Merged:
    """Write the submitters' trees at or directly below ``roots`` into the new folder ``output``, unless any collide."""
    try:
        _refuse_output(roots, output)
        trees = [_read(folder, is_input=folder == root) for root in roots for folder in submission_trees(root)]
        files = {path: source for tree in reversed(trees) for path, source in tree.files.items()}
        collisions = (*(refusal for tree in trees for refusal in tree.refused), *_collisions(trees))
        if not collisions:
            _write(files, output)
    except OSError as error:
        raise EncoreError(f"not merged: {error}", hint="check the permissions and the free space") from error
    except RuntimeError as error:  # Path.resolve, up to Python 3.12
        raise EncoreError(f"not merged: {error}", hint="use the folder instead of a link") from error
    return Merged(len(trees), len(files), collisions, None if collisions else output)


def _refuse_output(roots: Sequence[Path], output: Path) -> None:
    if output.is_symlink():
        raise EncoreError(f"{output} is a link", expected="a new folder", hint="pass the target folder of the link")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise EncoreError(f"{output} already exists", hint="choose a new folder: existing files are not overwritten")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise EncoreError(
            f"{above} is not a directory", expected=f"a folder to write {output.name} to", hint="choose a different one"
        )
    enclosing = next((root for root in roots if output.resolve().is_relative_to(root.resolve())), None)
    if enclosing is not None:
        raise EncoreError(f"{output} is in the input {enclosing}", hint="choose a folder outside the trees")


def _read(folder: Path, *, is_input: bool) -> _Tree:
    tree = _Tree(folder)
    if folder.is_symlink() and not is_input:
        tree.refused.append(Collision(folder.name, "a link", (str(folder),), "pass the target folder of the link"))
        return tree
    submitter = folder.resolve().name
    for parent, names, files in os.walk(folder, onerror=_raise):
        names[:] = sorted(set(names) - _NOT_OF_THE_TREE)
        for name in [*names, *sorted(files)]:
            path = Path(parent) / name
            target = PurePosixPath(submitter, *path.relative_to(folder).parts)
            # Printable names contain neither control characters nor invalid UTF-8.
            reason = "a name that is not plain" if not name.isprintable() or "\\" in name else _no_file(path)
            if reason:
                hint = "rename it" if reason.startswith("a name") else "put the file itself there"
                tree.refused.append(Collision(repr(str(target))[1:-1], reason, (str(folder),), hint))
            elif not path.is_dir():
                tree.files[target] = path
    return tree


def _raise(error: OSError) -> None:
    raise EncoreError(f"cannot read {error.filename}: {error.strerror}", hint="check its permissions")


def _no_file(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    return "" if path.is_file() or path.is_dir() else "neither a file nor a folder"


def _collisions(trees: Sequence[_Tree]) -> Iterator[Collision]:
    by_tree = ((tree, unit, paths) for tree in trees for unit, paths in grouped(tree.files, _unit).items())
    for unit, of in grouped(by_tree, lambda entry: entry[1]).items():
        files = [{path: tree.files[path] for path in paths} for tree, _, paths in of]
        if differ := _differing_files(files, is_set=unit.parts[1] == "results"):
            of_many = f"{count_of(len(differ), 'file')} not the same, such as {differ[0].name}"
            problem = "not the same" if unit == differ[0] else of_many
            hint = "keep that of one tree, or rename one of them"
            yield Collision(str(unit), problem, _folders(tree for tree, *_ in of), hint)
    yield from _similar_names(trees)
    parents = {parent for tree in trees for path in tree.files for parent in path.parents}
    for path in sorted(parents & {path for tree in trees for path in tree.files}):
        both = _folders(
            tree for tree in trees if any(path in (candidate, *candidate.parents) for candidate in tree.files)
        )
        yield Collision(str(path), "a file in one tree and a folder in another", both, "rename one of them")
    yield from _missing_descriptions(trees)


# Names that collide on some file systems; macOS also equates both Unicode forms of letters.
def _similar_names(trees: Sequence[_Tree]) -> Iterator[Collision]:
    spellings: dict[str, dict[str, dict[PurePosixPath, list[_Tree]]]] = {}
    for tree in trees:
        for path in dict.fromkeys(
            ancestor for file in tree.files for ancestor in (file, *file.parents) if ancestor.name
        ):
            name = unicodedata.normalize("NFC", unicodedata.normalize("NFD", str(path)).casefold())
            spellings.setdefault(name, {}).setdefault(path.name, {}).setdefault(path, []).append(tree)
    for names in (names for names in spellings.values() if len(names) > 1):
        names_text = " and ".join(str(next(iter(paths))) for paths in names.values())
        trees_of = _folders(tree for paths in names.values() for of in paths.values() for tree in of)
        yield Collision(
            names_text, "the same name except for case or Unicode normalization", trees_of, "rename one of them"
        )


# Smallest merge unit: a set, a system's code, or a file.
def _unit(path: PurePosixPath) -> PurePosixPath:
    depth = {"results": _SET_DEPTH, "benchmarks": _CODE_DEPTH}.get(path.parts[1])
    return PurePosixPath(*path.parts[:depth])


# Files that differ between the trees with this unit; sets must be complete in all trees.
def _differing_files(of: Sequence[_Files], *, is_set: bool) -> list[PurePosixPath]:
    sources = {path: [files[path] for files in of if path in files] for path in sorted(set().union(*of))}
    return [
        path
        for path, (first, *rest) in sources.items()
        if (is_set and len(rest) + 1 < len(of)) or not all(filecmp.cmp(first, other, shallow=False) for other in rest)
    ]


# Either two systems with the same name, or a system whose results are in a separate tree.
def _missing_descriptions(trees: Sequence[_Tree]) -> Iterator[Collision]:
    for tree in trees:
        for name in sorted(tree.referenced_systems - tree.systems):
            if describing := [other for other in trees if name in other.systems]:
                path = f"{name[0]}/systems/{name[1]}.json"
                reason = "described in another tree than that of its results or code"
                yield Collision(path, reason, _folders([tree, *describing]), "add the description to each tree")


def _folders(trees: Iterable[_Tree]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(tree.folder) for tree in trees))


# Atomic: written to a temporary folder in the same directory, then renamed.
def _write(files: Mapping[PurePosixPath, Path], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        merged = Path(scratch) / "merged"
        for relative_path, source in files.items():
            target = merged / relative_path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target, follow_symlinks=False)
        merged.rename(output)
