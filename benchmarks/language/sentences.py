"""Sentence splitter for English text.

The reference splits sentences with NLTK's punkt (do_sentence_segmentation.py), which needs a separate model download
that differs between releases. Here, a sentence ends at ".", "!" or "?", including closing quotes and brackets, if a
space and a capital letter, a digit or an opening quote or bracket follow. It does not end after a known abbreviation,
an initial or a list number.
"""

import re
from typing import List

# Words before an abbreviation's full stop. They rarely end a sentence.
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """
        adm al apr approx art aug ave b bros c ca capt cf ch cmdr co col comdr cpl d dec dept dr ed eds eg e.g esp est
        et feb fig figs fl fr ft gen gov hon i.e ie illus inc jan jr jul jun lat lit lt ltd maj mar messrs mr mrs ms mt
        no nos nov oct op p par pl pp prof pron pt rd ref rep rev r sec sen sept sep ser sgt sr st supt transl trans
        univ v var viz vol vols vs
        """,
    )
)
_END = re.compile(r"""([.!?]+)(["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])""")
_LAST_WORD = re.compile(r"""(?:^|[\s("'“‘\[])([^\s("'“‘\[]*)$""")
_INITIAL = re.compile(r"^(?:[A-Za-z]|(?:[A-Za-z]\.)+[A-Za-z])$")
LOOK_BACK = 32  # characters searched for the word before a full stop


def sentences_of(paragraph: str) -> List[str]:
    """Return a paragraph's non-empty sentences, stripped."""
    sentences, start = [], 0
    for match in _END.finditer(paragraph):
        if match.group(1) == "." and not match.group(2) and _is_abbreviated(paragraph, match.start()):
            continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviated(paragraph: str, stop: int) -> bool:
    match = _LAST_WORD.search(paragraph[max(0, stop - LOOK_BACK) : stop])
    word = match.group(1) if match else ""
    if _INITIAL.match(word):
        return word != "I"
    return word.lower() in _ABBREVIATIONS
