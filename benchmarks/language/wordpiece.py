"""WordPiece, uncased, by Hugging Face's tokenizers: text to the longest pieces of a vocabulary, as BERT cuts it.

The pieces are those of tokenization.py of the MLPerf v0.7 submission (google-research/bert) for every text without
characters of private use, which the library removes. Where BertTokenizer's defaults differ, the reference counts: the
text of a special entry, such as "[MASK]", is ordinary text, so that words of an article do not become marks of the
task; words of 101 to 200 letters are cut; a capital sigma at a word's end becomes the final one.

    tokenizer = Tokenizer(read(Path("vocab.txt")))
    tokenizer.pieces("unaffable!")               # ["una", "##ffa", "##ble", "!"]
    tokenizer.encode("unaffable!").offsets       # where each piece begins and ends in the text
"""

from typing import Callable, List, Mapping

import tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from benchmarks.translation.segment import learn_codes

LONGEST_WORD = 200  # letters; a longer word is unknown (max_input_chars_per_word)
_END_OF_WORD = "</w>"  # behind the last letter of a word (subword-nmt)
_NORMALIZER = BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True)
_PRE_TOKENIZER = BertPreTokenizer()


class Tokenizer:
    # Text to pieces of a vocabulary, without [CLS] and [SEP].

    def __init__(self, vocabulary: Vocabulary, longest_word: int = LONGEST_WORD) -> None:
        self.vocabulary = vocabulary
        model = WordPiece(dict(vocabulary.places), unk_token="[UNK]", max_input_chars_per_word=longest_word)
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer, self._tokenizer.pre_tokenizer = _NORMALIZER, _PRE_TOKENIZER

    def encode(self, text: str) -> tokenizers.Encoding:
        """Return the ``ids`` of a text, and the ``offsets`` of each piece: its first character, and behind its last."""
        return self._tokenizer.encode(_with_final_sigmas(text), add_special_tokens=False)

    def pieces(self, text: str) -> List[str]:
        return [self.vocabulary.entries[id_] for id_ in self.encode(text).ids]


def words(text: str) -> List[str]:
    """Return the words of a text as the vocabulary counts them: lower case, no accents, punctuation apart."""
    normal = _NORMALIZER.normalize_str(_with_final_sigmas(text))
    return [word for word, _ in _PRE_TOKENIZER.pre_tokenize_str(normal)]


def _with_final_sigmas(text: str) -> str:
    # Put each capital sigma in lower case as ``str.lower`` does, which depends on the letters around it.
    if "Σ" not in text:
        return text
    lowered = text.replace("İ", "I").lower()  # the only letter with a lower case of two
    return "".join(small if letter == "Σ" else letter for letter, small in zip(text, lowered))


def learn(counts: Mapping[str, int], size: int, report: Callable[[int], None] = lambda done: None) -> List[str]:
    """Return at most ``size`` entries: the special ones, all letters at a word's begin and within one, and merges.

    Words are those of ``counts``. They are merged backwards, so that the mark which byte pair encoding has
    behind the last letter is at the first one: what does not have it gets "##".
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
