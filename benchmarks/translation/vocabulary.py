"""Joint vocabulary of both languages, and conversion of ids to text.

The first four entries are special, with the same ids in all data sets. The order in a submission does not affect any
number: ids only index embedding rows.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable, List, Optional, Tuple

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
JOIN = "@@"  # suffix for a token that the next token continues, as in subword-nmt
# Kinds of vocabulary: byte pair encoding of subword-nmt, subtokens of tensor2tensor.
BPE, SUBTOKENS = "bpe", "subtokens"

_ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")
# Replacements of the Transformer's submission (detokenize_subtokenized_sentence of train.py, v0.7).
_SPACED = ((" ,", ","), (" .", "."), (" !", "!"), (" ?", "?"), (" ' ", "'"), (" - ", "-"))


@dataclass(frozen=True)
class Vocabulary:
    # Entries by id, and the conversion of ids to text.

    entries: Tuple[str, ...]  # all entries, special tokens first
    kind: str = BPE
    # Language for the detokenizer; None if the references are tokenized: then words are not detokenized.
    language: Optional[str] = None

    @property
    def size(self) -> int:
        return len(self.entries)

    def padded(self, multiple: int) -> int:
        # Return the size rounded up to a multiple, as tensor cores want it.
        return -(-self.size // multiple) * multiple

    def tokens(self, ids: Iterable[int]) -> List[str]:
        """Return a sentence's entries up to EOS, without padding; ids after the last entry are unknown."""
        tokens = []
        for id_ in ids:
            if id_ == EOS:
                break
            if id_ not in (PAD, BOS):
                tokens.append(self.entries[id_] if id_ < self.size else SPECIAL[UNK])
        return tokens

    def text(self, ids: Iterable[int]) -> str:
        # Return a sentence for BLEU: rejoined words, detokenized if the references are.
        tokens = self.tokens(ids)
        if self.kind == SUBTOKENS:
            return join_subtokens(tokens)
        merged_words = join_bpe(tokens)
        return merged_words if self.language is None else detokenize(merged_words, self.language)

    def joined(self, ids: Iterable[int]) -> str:
        """Return a sentence as the Transformer's submissions compare it, references included: not detokenized."""
        tokens = self.tokens(ids)
        return join_as_submitted(tokens) if self.kind == SUBTOKENS else join_bpe(tokens)


def join_bpe(tokens: Iterable[str]) -> str:
    # Rejoin words; a trailing mark at the end is removed.
    joined = " ".join(tokens).replace(JOIN + " ", "")
    return joined[: -len(JOIN)] if joined.endswith(JOIN) else joined


def join_subtokens(tokens: Iterable[str]) -> str:
    """Join subtokens: ``_`` ends a token, a backslash escapes, a space is between two words (tensor2tensor)."""
    text, was_word = "", False
    for token in filter(None, map(_unescape, "".join(tokens).split("_"))):
        is_word = unicodedata.category(token[0])[0] in "LN"
        text += f" {token}" if was_word and is_word else token
        was_word = is_word
    return text.strip()


def join_as_submitted(tokens: Iterable[str]) -> str:
    """Join subtokens with spaces and rejoin some punctuation, as the Transformer's submission does before BLEU.

    Escapes are kept, and white space inside of tokens is removed.
    """
    text = " ".join("".join("".join(tokens).split()).split("_"))
    for apart, together in _SPACED:
        text = text.replace(apart, together)
    return text.strip()


def _unescape(token: str) -> str:
    def character(match: "re.Match[str]") -> str:
        if match.group(1) is None:
            return "_" if match.group(0) == "\\u" else "\\"
        number = int(match.group(1))
        return chr(number) if number < 0x110000 else ""

    return _ESCAPED.sub(character, token)


@lru_cache(maxsize=None)
def _detokenizer(language: str) -> Any:
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang=language)


def detokenize(text: str, language: str) -> str:
    """Undo Moses' tokenizer, as GNMT's submission does before BLEU (detokenizer.perl)."""
    return _detokenizer(language).detokenize(text.split())


def write(path: Path, entries: Iterable[str]) -> None:
    # Write one entry per line, without the special tokens, which are always the same.
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(entry + "\n" for entry in entries)


def read(path: Path) -> Tuple[str, ...]:
    return (*SPECIAL, *path.read_text(encoding="utf-8").split("\n")[:-1])
