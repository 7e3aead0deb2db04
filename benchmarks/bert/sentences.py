"""Cuts English paragraphs into sentences by rules.

The reference uses NLTK's punkt (do_sentence_segmentation.py), whose model is a download of its own and differs between
releases. A sentence ends here at ".", "!" or "?", with what closes a quotation or a bracket, where a space and a
capital, a digit or an opening mark follow; not behind a known abbreviation, an initial or a number of a list.
"""

from __future__ import annotations

import re
from typing import List

# What may stand before the full stop of an abbreviation that is rarely a sentence's last word.
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
LOOK_BACK = 32  # characters before a full stop in which its word is looked for


def split(paragraph: str) -> List[str]:
    """Return the sentences of a paragraph, without spaces around them; none is empty."""
    found, begin = [], 0
    for match in _END.finditer(paragraph):
        if match.group(1) == "." and not match.group(2) and _is_abbreviated(paragraph, match.start()):
            continue
        found.append(paragraph[begin : match.end()].strip())
        begin = match.end()
    found.append(paragraph[begin:].strip())
    return [sentence for sentence in found if sentence]


def _is_abbreviated(paragraph: str, stop: int) -> bool:
    match = _LAST_WORD.search(paragraph[max(0, stop - LOOK_BACK) : stop])
    word = match.group(1) if match else ""
    if _INITIAL.match(word):
        return word != "I"
    return word.lower() in _ABBREVIATIONS
