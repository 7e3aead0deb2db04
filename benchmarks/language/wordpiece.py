"""Uncased WordPiece with Hugging Face's tokenizers, as in BERT.

Same tokens as tokenization.py of the MLPerf v0.7 submission (google-research/bert) for all text without private-use
characters, which the library removes. Differences from BertTokenizer's defaults follow the reference: special tokens
in the text, such as "[MASK]", are ordinary text, so that articles cannot contain task markers; words of 101 to 200
letters are split; a capital sigma at a word's end becomes a final sigma.

    tokenizer = Tokenizer(read(Path("vocab.txt")))
    tokenizer.pieces("unaffable!")               # ["una", "##ffa", "##ble", "!"]
    tokenizer.encode("unaffable!").offsets       # start and end of the pieces in the text
"""

from typing import Callable, List, Mapping

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from benchmarks.translation.segment import learn_codes

LONGEST_WORD = 200  # letters; a longer word is unknown (max_input_chars_per_word)
_END_OF_WORD = "</w>"  # end-of-word mark of subword-nmt
_NORMALIZER = BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True)
_PRE_TOKENIZER = BertPreTokenizer()


class Tokenizer:
    # Split text into WordPiece tokens, without [CLS] and [SEP].

    def __init__(self, vocabulary: Vocabulary, longest_word: int = LONGEST_WORD) -> None:
        self.vocabulary = vocabulary
        model = WordPiece(dict(vocabulary.places), unk_token="[UNK]", max_input_chars_per_word=longest_word)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = _NORMALIZER, _PRE_TOKENIZER

    def encode(self, text: str) -> tokenizers.Encoding:
        """Return a text's ``ids``, and the ``offsets`` (start, end) of the tokens in characters."""
        return self._tokenizer.encode(_with_final_sigmas(text), add_special_tokens=False)

    def pieces(self, text: str) -> List[str]:
        return [self.vocabulary.entries[id_] for id_ in self.encode(text).ids]


def words(text: str) -> List[str]:
    """Split text into words for learning a vocabulary: lower case, no accents, punctuation separated."""
    normal = _NORMALIZER.normalize_str(_with_final_sigmas(text))
    return [word for word, _ in _PRE_TOKENIZER.pre_tokenize_str(normal)]


def _with_final_sigmas(text: str) -> str:
    # Lowercase the capital sigma as ``str.lower``, which depends on the adjacent letters.
    if "Σ" not in text:
        return text
    lowered = text.replace("İ", "I").lower()  # the only letter with a lower case of two
    return "".join(small if letter == "Σ" else letter for letter, small in zip(text, lowered))


def learn(counts: Mapping[str, int], size: int, report: Callable[[int], None] = lambda done: None) -> List[str]:
    """Learn up to ``size`` entries: special tokens, all letters at the start of words and within words, and merges.

    ``counts``: word frequencies. Words are merged in reverse, so that BPE's mark after the last letter marks the
    first letter; pieces without the mark get "##".
    """
    letters = sorted({letter for word in counts for letter in word})
    entries = dict.fromkeys((*SPECIAL, *letters, *(f"##{letter}" for letter in letters)))
    backwards = {word[::-1]: count for word, count in counts.items()}
    codes = learn_codes(backwards, max(0, size - len(entries)), report)
    for line in codes.split("\n")[1:-1]:
        piece = line.replace(" ", "")
        is_last = piece.endswith(_END_OF_WORD)
        text = piece[: -len(_END_OF_WORD)][::-1] if is_last else "##" + piece[::-1]
        entries.setdefault(text)
    return list(entries)[:size]
