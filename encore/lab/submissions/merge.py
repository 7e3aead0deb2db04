"""One tree of several submitters' trees, as a round's repository is, and what collides in them.

    SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt ...    a set is of one tree alone, or the same in each
    SUBMITTER/systems/SYSTEM.json                          one description of a system, next to its results
    SUBMITTER/benchmarks/...                               files of several trees together

Where anything collides nothing is written. A file that is the same in two trees is no collision. Trees are somebody
else's: no link in them is followed, and no name is taken that is not plain.
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
_Files = dict[PurePosixPath, Path]  # Files by their place in the merged tree
_SET_DEPTH, _CODE_DEPTH = 4, 5  # SUBMITTER/results/SYSTEM/BENCHMARK, SUBMITTER/benchmarks/B/implementations/SYSTEM


@dataclass(frozen=True)
class Collision:
    """A place in the merged tree that the trees do not agree on."""

    place: str
    why: str
    trees: tuple[str, ...]
    hint: str


@dataclass(frozen=True)
class Merged:
    """What a merge found; ``output`` is None where something collides, so that nothing was written."""

    trees: int
    files: int
    collisions: tuple[Collision, ...]
    output: Path | None


# One submitter's tree, and what of it cannot be taken.
@dataclass(frozen=True)
class _Tree:
    folder: Path
    files: _Files = field(default_factory=dict)
    refused: list[Collision] = field(default_factory=list)

    @property
    def systems(self) -> frozenset[tuple[str, str]]:
        """Systems that it describes, as submitter and system."""
        parts = (place.parts for place in self.files)
        return frozenset(
            (each[0], each[2].removesuffix(".json"))
            for each in parts
            if len(each) == _SET_DEPTH - 1 and each[1] == "systems" and each[2].endswith(".json")
        )

    @property
    def used(self) -> frozenset[tuple[str, str]]:
        """Systems that its results or code are of."""
        named = {"results": (2, _SET_DEPTH), "benchmarks": (_CODE_DEPTH - 1, _CODE_DEPTH)}
        parts = (place.parts for place in self.files)
        known = ((each, *named.get(each[1], (0, len(each)))) for each in parts)
        return frozenset((each[0], each[at]) for each, at, depth in known if len(each) > depth)


def merge_trees(roots: Sequence[Path], output: Path) -> Merged:
    """Write the submitters' trees at or directly below ``roots`` into the new folder ``output``, unless any collide."""
    try:
        _refuse_output(roots, output)
        trees = [_read(folder, given=folder == root) for root in roots for folder in submission_trees(root)]
        files = {place: source for tree in reversed(trees) for place, source in tree.files.items()}
        collisions = (*(each for tree in trees for each in tree.refused), *_collisions(trees))
        if not collisions:
            _write(files, output)
    except OSError as error:
        raise EncoreError(f"not merged: {error}", hint="check the permissions and the free space") from error
    except RuntimeError as error:  # Path.resolve, up to Python 3.12
        raise EncoreError(f"not merged: {error}", hint="name the folder itself, and no link") from error
    return Merged(len(trees), len(files), collisions, None if collisions else output)


def _refuse_output(roots: Sequence[Path], output: Path) -> None:
    if output.is_symlink():
        raise EncoreError(f"{output} is a link", expected="a new folder", hint="name the folder that it leads to")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise EncoreError(f"{output} is there already", hint="give a new folder: a merge overwrites nothing")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise EncoreError(f"{above} is no folder", expected=f"a folder to write {output.name} to", hint="name another")
    inside = next((root for root in roots if output.resolve().is_relative_to(root.resolve())), None)
    if inside is not None:
        raise EncoreError(f"{output} is in {inside}, which is merged", hint="give a folder outside of the trees")


def _read(folder: Path, *, given: bool) -> _Tree:
    tree = _Tree(folder)
    if folder.is_symlink() and not given:
        tree.refused.append(Collision(folder.name, "a link", (str(folder),), "name the folder that it leads to"))
        return tree
    submitter = folder.resolve().name
    for parent, names, files in os.walk(folder, onerror=_raise):
        names[:] = sorted(set(names) - _NOT_OF_THE_TREE)
        for name in [*names, *sorted(files)]:
            path = Path(parent) / name
            place = PurePosixPath(submitter, *path.relative_to(folder).parts)
            # What is printable is no control character, and neither a byte that is no UTF-8.
            why = "a name that is not plain" if not name.isprintable() or "\\" in name else _no_file(path)
            if why:
                hint = "rename it" if why.startswith("a name") else "put the file itself there"
                tree.refused.append(Collision(repr(str(place))[1:-1], why, (str(folder),), hint))
            elif not path.is_dir():
                tree.files[place] = path
    return tree


def _raise(error: OSError) -> None:
    raise EncoreError(f"cannot read {error.filename}: {error.strerror}", hint="check its permissions")


def _no_file(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    return "" if path.is_file() or path.is_dir() else "neither a file nor a folder"


def _collisions(trees: Sequence[_Tree]) -> Iterator[Collision]:
    units: dict[PurePosixPath, list[tuple[_Tree, _Files]]] = {}
    for tree in trees:
        for unit, places in grouped(tree.files, _unit).items():
            units.setdefault(unit, []).append((tree, {place: tree.files[place] for place in places}))
    for unit, of in units.items():
        differ = _differing([files for _, files in of], is_set=unit.parts[1] == "results")
        if differ:
            of_many = f"{count_of(len(differ), 'file')} not the same, such as {differ[0].name}"
            found = "not the same" if unit == differ[0] else of_many
            hint = "keep that of one tree, or give one another name"
            yield Collision(str(unit), found, _folders(tree for tree, _ in of), hint)
    yield from _spelled_alike(trees)
    parents = {parent for tree in trees for place in tree.files for parent in place.parents}
    for place in sorted(parents & {place for tree in trees for place in tree.files}):
        both = _folders(tree for tree in trees if any(place in (each, *each.parents) for each in tree.files))
        yield Collision(str(place), "a file in one tree and a folder in another", both, "rename one of them")
    yield from _undescribed(trees)


# Names in one folder that some file systems do not keep apart; macOS also takes both Unicode forms of a letter as one.
def _spelled_alike(trees: Sequence[_Tree]) -> Iterator[Collision]:
    found: dict[str, dict[str, dict[PurePosixPath, list[_Tree]]]] = {}
    for tree in trees:
        for place in dict.fromkeys(each for file in tree.files for each in (file, *file.parents) if each.name):
            name = unicodedata.normalize("NFC", unicodedata.normalize("NFD", str(place)).casefold())
            found.setdefault(name, {}).setdefault(place.name, {}).setdefault(place, []).append(tree)
    for names in (names for names in found.values() if len(names) > 1):
        shown = " and ".join(str(next(iter(places))) for places in names.values())
        trees_of = _folders(tree for places in names.values() for of in places.values() for tree in of)
        yield Collision(shown, "the same name but for its case or Unicode form", trees_of, "give one another name")


# What is decided as a whole: a set, a system's code, else a file.
def _unit(place: PurePosixPath) -> PurePosixPath:
    depth = {"results": _SET_DEPTH, "benchmarks": _CODE_DEPTH}.get(place.parts[1], len(place.parts))
    return PurePosixPath(*place.parts[:depth])


# The files of a unit that are not the same in all trees with this unit; a set has them all in each.
def _differing(of: Sequence[_Files], *, is_set: bool) -> list[PurePosixPath]:
    found = []
    for place in sorted({place for files in of for place in files}):
        first, *others = (files[place] for files in of if place in files)
        lacking = is_set and len(others) + 1 < len(of)
        if lacking or not all(filecmp.cmp(first, other, shallow=False) for other in others):
            found.append(place)
    return found


# Two machines of one name look like this, and so does one whose results are in a tree of their own.
def _undescribed(trees: Sequence[_Tree]) -> Iterator[Collision]:
    for tree in trees:
        for name in sorted(tree.used - tree.systems):
            others = [other for other in trees if name in other.systems]
            if others:
                place = f"{name[0]}/systems/{name[1]}.json"
                why = "described in another tree than that of its results or code"
                yield Collision(place, why, _folders([tree, *others]), "put the description into each tree")


def _folders(trees: Iterable[_Tree]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(tree.folder) for tree in trees))


# Whole or not at all: in a folder next to it, which then takes its name.
def _write(files: Mapping[PurePosixPath, Path], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        whole = Path(scratch) / "merged"
        for place, source in files.items():
            target = whole / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target, follow_symlinks=False)
        whole.rename(output)
