"""WordPiece vocabulary: entries by id, and the published file format with one entry per line."""

from pathlib import Path
from typing import Iterable

from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import read_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_ENTRIES = 1 << 16  # ids are stored as uint16


class Vocabulary:
    # Entries by id, and the ids of the special tokens, which all vocabularies have.

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self.size = len(self.entries)
        self.places = {entry: index for index, entry in enumerate(self.entries)}
        self.unk, self.cls, self.sep, self.mask = (self.places[entry] for entry in SPECIAL[1:])

    def text(self, ids: Iterable[int]) -> str:
        return " ".join(self.entries[id_] for id_ in ids).replace(" ##", "")


def write(path: Path, entries: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(entry + "\n" for entry in entries)


def read(path: Path) -> Vocabulary:
    """Read a vocabulary file: one entry per line, starting with id 0.

    Raises:
        Problem: the file cannot be read, is not UTF-8, has duplicates, lacks a special token, or is too long.
    """
    hint = "take vocab.txt as published with BERT (uncased: 30,522 lines)"
    try:
        entries = tuple(line.rstrip("\r") for line in read_bytes(path).decode("utf-8-sig").split("\n"))
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}", "a vocabulary file", hint) from None
    except UnicodeDecodeError as error:
        raise Problem(f"{path} is not UTF-8: byte {error.start:,}", "one entry per line in UTF-8", hint) from None
    entries = entries[:-1] if entries[-1] == "" else entries
    missing = [entry for entry in SPECIAL if entry not in entries]
    if missing:
        raise Problem(f"{path} lacks {', '.join(missing)}", f"{' '.join(SPECIAL)} among the entries", hint)
    if len(entries) > MOST_ENTRIES:
        raise Problem(f"{path} has {len(entries):,} entries", f"at most {MOST_ENTRIES:,}", hint)
    if len(set(entries)) < len(entries):
        first = next(index for index, entry in enumerate(entries) if entry in entries[:index])
        raise Problem(f"{path}, line {first + 1:,}: {entries[first]!r} again", "every entry once", hint)
    return Vocabulary(entries)
