"""WordPiece, uncased: text to words, and words to the longest pieces of a vocabulary, as BERT's tokenization.py.

Source: tokenization.py of the MLPerf v0.7 submission (google-research/bert), with the same pieces for every text.
Hugging Face's BertTokenizer has the same ones but for these: the text of a special entry, such as "[MASK]", is
ordinary text here, so that words of an article do not become marks of the task; words of 101 to 200 letters are cut;
characters of private use stay; a capital sigma at a word's end becomes the final one, as str.lower() has it.

    tokenizer = Tokenizer(read(Path("vocab.txt")))
    tokenizer.pieces("unaffable!")       # ["una", "##ffa", "##ble", "!"]
    tokenizer.spans("unaffable!")        # ids, and where each piece begins and ends in the text
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Tuple

from benchmarks.common.data.problem import Problem

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_ENTRIES = 1 << 16
"""Ids are stored as uint16."""
LONGEST_WORD = 200
"""Letters; a longer word is unknown (max_input_chars_per_word)."""
CACHED_WORDS = 1 << 20
"""Words whose pieces are kept; then the cache starts anew, so that its memory is bounded (about 300 MB)."""

# str.split() cuts at these, but the reference removes them as control characters before it cuts.
_REMOVED_SPACES = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
_ASCII_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASCII_WORD = re.compile(r"[a-z0-9]+|[^a-z0-9\s]")
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Vocabulary:
    """The entries by id."""

    entries: Tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.entries)

    @cached_property
    def places(self) -> Dict[str, int]:
        """The id of each entry."""
        return {entry: place for place, entry in enumerate(self.entries)}

    def index(self, text: str) -> int:
        """Return the id of an entry, or that of [UNK]."""
        return self.places.get(text, self.unk)

    @cached_property
    def pad(self) -> int:
        """The id of [PAD]."""
        return self.places["[PAD]"]

    @cached_property
    def unk(self) -> int:
        """The id of [UNK]."""
        return self.places["[UNK]"]

    @cached_property
    def cls(self) -> int:
        """The id of [CLS]."""
        return self.places["[CLS]"]

    @cached_property
    def sep(self) -> int:
        """The id of [SEP]."""
        return self.places["[SEP]"]

    @cached_property
    def mask(self) -> int:
        """The id of [MASK]."""
        return self.places["[MASK]"]

    def text(self, ids: Iterable[int]) -> str:
        """Return the words of ids, pieces joined."""
        return " ".join(self.entries[each] for each in ids).replace(" ##", "")


def write(path: Path, entries: Iterable[str]) -> None:
    """Write the entries, one a line."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(entry + "\n" for entry in entries)


def read(path: Path) -> Vocabulary:
    """Read a vocabulary file: one entry a line, the first one has id 0.

    Raises:
        Problem: it cannot be read, is not UTF-8, has an entry twice, lacks a special one, or has too many.
    """
    remedy = "take vocab.txt as published with BERT (uncased: 30,522 lines)"
    try:
        entries = tuple(line.rstrip("\r") for line in path.read_bytes().decode("utf-8").split("\n"))
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}", "a vocabulary file", remedy) from None
    except UnicodeDecodeError as error:
        raise Problem(f"{path} is not UTF-8: byte {error.start:,}", "one entry a line in UTF-8", remedy) from None
    entries = entries[:-1] if entries[-1] == "" else entries
    missing = [each for each in SPECIAL if each not in entries]
    if missing:
        raise Problem(f"{path} lacks {', '.join(missing)}", f"{' '.join(SPECIAL)} among the entries", remedy)
    if len(entries) > MOST_ENTRIES:
        raise Problem(f"{path} has {len(entries):,} entries", f"at most {MOST_ENTRIES:,}", remedy)
    if len(set(entries)) < len(entries):
        first = next(place for place, each in enumerate(entries) if each in entries[:place])
        raise Problem(f"{path}, line {first + 1:,}: {entries[first]!r} again", "every entry once", remedy)
    return Vocabulary(entries)


class Spans(NamedTuple):
    """The pieces of a text and where they are in it."""

    ids: List[int]
    begins: List[int]
    """First character of each piece in the text as it was given."""
    ends: List[int]
    """Behind its last one."""


class Tokenizer:
    """Text to ids; the pieces of words that were seen are kept, which is most of its speed."""

    def __init__(self, vocabulary: Vocabulary, longest_word: int = LONGEST_WORD) -> None:
        self.vocabulary = vocabulary
        self._longest_word = longest_word
        self._longest_entry = max(map(len, vocabulary.entries))
        self._known: Dict[str, List[int]] = {}
        self._known_spans: Dict[str, Spans] = {}

    def ids(self, text: str) -> List[int]:
        """Return the ids of a text, without [CLS] and [SEP]."""
        known = self._known
        found: List[int] = []
        for word in words(text):
            ids = known.get(word)
            if ids is None:
                if len(known) >= CACHED_WORDS:
                    known.clear()
                ids = known[word] = self._split(word)[0]
            found += ids
        return found

    def pieces(self, text: str) -> List[str]:
        """Return the entries of a text."""
        return [self.vocabulary.entries[each] for each in self.ids(text)]

    def spans(self, text: str) -> Spans:
        """Return the ids of a text and where each piece is in it."""
        found = Spans([], [], [])
        # A space keeps the place of what is removed where it is not within a word.
        if _REMOVED_SPACES.search(text):
            return self._spans_of(text, found)
        for match in _WORD.finditer(text):
            word, place = match.group(), match.start()
            spans = self._known_spans.get(word)
            if spans is None:
                if len(self._known_spans) >= CACHED_WORDS:
                    self._known_spans.clear()
                spans = self._known_spans[word] = self._spans_of(word, Spans([], [], []))
            found.ids.extend(spans.ids)
            found.begins.extend(place + each for each in spans.begins)
            found.ends.extend(place + each for each in spans.ends)
        return found

    def _spans_of(self, text: str, found: Spans) -> Spans:
        """Append the pieces of a text to ``found``."""
        letters, origins = _normalize(text)
        for match in _WORD.finditer(letters):
            first = match.start()
            for begin, end in _cuts(match.group()):
                place = first + begin
                ids, ends = self._split(letters[first + begin : first + end])
                for each, stop in zip(ids, ends):
                    found.ids.append(each)
                    found.begins.append(origins[place])
                    place = first + begin + stop
                    found.ends.append(origins[place - 1] + 1)
        return found

    def _split(self, word: str) -> Tuple[List[int], List[int]]:
        """Return the ids of a word's longest pieces from the left, and where each ends; [UNK] where one is missing."""
        places, size = self.vocabulary.places, len(word)
        if size > self._longest_word:
            return [self.vocabulary.unk], [size]
        whole = places.get(word)
        if whole is not None:
            return [whole], [size]
        ids: List[int] = []
        ends: List[int] = []
        begin, mark = 0, ""
        while begin < size:
            for end in range(min(size, begin + self._longest_entry), begin, -1):
                piece = places.get(mark + word[begin:end])
                if piece is not None:
                    break
            else:
                return [self.vocabulary.unk], [size]
            ids.append(piece)
            ends.append(end)
            begin, mark = end, "##"
        return ids, ends


# -- basic tokenizer ---------------------------------------------------------------------------------------


def words(text: str) -> List[str]:
    """Return the words of a text as the vocabulary counts them: lower case, no accents, punctuation apart."""
    if text.isascii():
        return _ASCII_WORD.findall(_ASCII_CONTROL.sub("", text).lower())
    found: List[str] = []
    for word in _REMOVED_SPACES.sub("", text).split():
        found += words(word) if word.isascii() else _cut_word(word)
    return found


def _cut_word(word: str) -> List[str]:
    """Return the parts of what stands between two spaces."""
    cleaned = "".join(map(_cleaned, word)).lower()
    letters = "".join(each for each in unicodedata.normalize("NFD", cleaned) if not _is_accent(each))
    return [part[begin:end] for part in letters.split() for begin, end in _cuts(part)]


def _cuts(word: str) -> List[Tuple[int, int]]:
    """Return where the parts of a word begin and end: each punctuation mark is one of its own."""
    found: List[Tuple[int, int]] = []
    begin = 0
    for place, each in enumerate(word):
        if _is_punctuation(each):
            if place > begin:
                found.append((begin, place))
            found.append((place, place + 1))
            begin = place + 1
    if begin < len(word):
        found.append((begin, len(word)))
    return found


def _normalize(text: str) -> Tuple[str, List[int]]:
    """Return the text in lower case without accents, ideographs apart, and where each character comes from."""
    cleaned, origins = [], []
    for place, each in enumerate(text):
        for letter in _cleaned(each):
            cleaned.append(letter)
            origins.append(place)
    # All at once: the small sigma at a word's end is another one.
    lowered = "".join(cleaned).lower()
    if len(lowered) != len(cleaned):
        origins = [place for letter, place in zip(cleaned, origins) for _ in letter.lower()]
    letters, places = [], []
    for letter, place in zip(lowered, origins):
        for part in unicodedata.normalize("NFD", letter):
            if not _is_accent(part):
                letters.append(part)
                places.append(place)
    return "".join(letters), places


@lru_cache(maxsize=1 << 17)
def _cleaned(letter: str) -> str:
    """Return a character as the tokenizer takes it: nothing for a control character, spaces around an ideograph."""
    code = ord(letter)
    if letter in "\t\n\r":
        return " "
    kind = unicodedata.category(letter)
    if kind in ("Cc", "Cf") or code == 0xFFFD:
        return ""
    if kind == "Zs":
        return " "
    if code >= 0x3400 and any(first <= code <= last for first, last in _IDEOGRAPHS):
        return f" {letter} "
    return letter


@lru_cache(maxsize=1 << 17)
def _is_accent(letter: str) -> bool:
    return unicodedata.category(letter) == "Mn"


@lru_cache(maxsize=1 << 17)
def _is_punctuation(letter: str) -> bool:
    # All of ASCII that is neither letter nor digit, "^" and "$" too, which Unicode calls symbols.
    if letter.isascii():
        return not letter.isalnum() and 33 <= ord(letter) <= 126
    return unicodedata.category(letter).startswith("P")
