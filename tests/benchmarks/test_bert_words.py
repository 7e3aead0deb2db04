"""BERT's words: cut as published, found in a text, learnt, and refused."""

import re
from pathlib import Path

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.language import learning, vocabulary
from benchmarks.language.vocabulary import SPECIAL, Vocabulary
from benchmarks.language.wordpiece import Tokenizer
from tests.bert_data import (
    unpack,
)

PIECES = ("un", "##able", "##aff", "##s", "real", "##ly", "we", "run", "a", "##b", "##c", "don", "t", "漢", "e")
MARKS = (",", ".", "?", "!", "'", "-", "[", "]", "mask", "¿", "σ", "##ς")
SMALL = Vocabulary((*SPECIAL, *PIECES, *MARKS))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Unaffable, réally?!", ["un", "##aff", "##able", ",", "real", "##ly", "?", "!"]),
        ("don't--RUNS", ["don", "'", "t", "-", "-", "run", "##s"]),
        ("a\u0301bc A\u200bb\x1cc", ["a", "##b", "##c", "a", "##b", "##c"]),
        ("漢we漢", ["漢", "we", "漢"]),
        ("we\u00a0run\u3000é \ufffd\x00", ["we", "run", "e"]),
        ("[MASK] ¿unknown", ["[", "mask", "]", "¿", "[UNK]"]),
        ("ΣΣ", ["σ", "##ς"]),
        ("Σ.a ΣΣİ", ["σ", ".", "a", "[UNK]"]),
        (f"{'a' + 'b' * 199} {'a' + 'b' * 200}", ["a", *["##b"] * 199, "[UNK]"]),
        (" \t\n", []),
    ],
    ids=["accents", "punctuation", "removed", "ideographs", "spaces", "marks", "sigma", "no sigma", "long", "nothing"],
)
def test_words_are_cut_as_bert_cuts_them(text: str, pieces: list[str]) -> None:
    assert Tokenizer(SMALL).pieces(text) == pieces


def test_offsets_are_those_of_the_text_as_it_was_given() -> None:
    text = "  Réally,\x00 unaffable İ 漢e"
    offsets = Tokenizer(SMALL).encode(text).offsets
    assert [text[begin:end] for begin, end in offsets] == ["Réal", "ly", ",", "un", "aff", "able", "İ", "漢", "e"]


PUBLISHED = {
    # As BertTokenizer of transformers 4.57.6 has them, slow and fast.
    "Unaffable, réally?!": "una ##ffa ##ble , really ? !",
    "naïve café Ångström": "naive cafe ang ##strom",
    "漢字kanji": "漢 [UNK] kan ##ji",
    "ﬁancée x\u200by": "ﬁ ##ance ##e x ##y",
    "$1,000.50 (US) C++ & C#": "$ 1 , 000 . 50 ( us ) c + + & c #",
    "İstanbul “quoted” — dash…": "istanbul “ quoted ” — dash …",
    "한국어": "ᄒ ##ᅡ ##ᆫ ##ᄀ ##ᅮ ##ᆨ ##ᄋ ##ᅥ",
    "e=mc² 🙂 ok": "e = mc ##² [UNK] ok",
    "\x1cab\x0bc\ufffd": "abc",
}


def test_published_vocabulary_gives_the_pieces_of_hugging_face(tmp_path: Path) -> None:
    path = next(unpack("bert_vocab.tar.xz", tmp_path).rglob("vocab.txt"))
    known = vocabulary.read(path)
    assert (known.size, known.unk, known.cls, known.mask) == (30522, 100, 101, 103)
    tokenizer = Tokenizer(known)
    assert {text: " ".join(tokenizer.pieces(text)) for text in PUBLISHED} == PUBLISHED


def test_learnt_vocabulary_has_the_frequent_words_whole_and_spells_the_others() -> None:
    words = {"banana": 50, "bandana": 9, "an": 30, "nab": 1}
    entries = learning.learn(words, 18)
    assert entries[:5] == list(SPECIAL) and len(entries) == 18
    tokenizer = Tokenizer(Vocabulary(tuple(entries)))
    assert tokenizer.pieces("banana an") == ["banana", "an"]
    assert "".join(piece.removeprefix("##") for piece in tokenizer.pieces("nabdan")) == "nabdan"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a\nb\n", "lacks [PAD]"),
        ("\n".join([*SPECIAL[:-1], "a"]).encode(), "lacks [MASK]"),
        ("\n".join([*SPECIAL, "a", "b", "a"]).encode(), "line 8: 'a' again"),
        (b"[PAD]\n\xff\n", "not UTF-8"),
        ("\n".join([*SPECIAL, *map(str, range(1 << 16))]).encode(), "65,541 entries"),
    ],
    ids=["none", "mask", "twice", "encoding", "many"],
)
def test_vocabulary_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(Problem, match=re.escape(told)):
        vocabulary.read(tmp_path / "vocab.txt")
