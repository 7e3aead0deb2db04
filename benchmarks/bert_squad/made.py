"""The small set: paragraphs about invented people, and questions whose answer is in the sentence about the right one.

"Ada Brook lives in New Haven and works as a baker. ..." with "Where does Ada Brook live?", "What does Ada Brook work
as?" and "Who lives in New Haven?". Each paragraph has several people, towns and trades, all different, so that the kind
of a word does not give an answer: the question has to be compared with each sentence.
"""

from __future__ import annotations

import random
from typing import List, NamedTuple, Tuple

from benchmarks.bert_squad.squad import Answer, Paragraph, Question

NAME = "made-questions"
FIRST_NAMES = "Ada Ben Cora Dan Eva Finn Gina Hugo Ida Jack Kim Leo".split()
LAST_NAMES = "Brook Field Hill Marsh Stone Wood".split()
TOWNS = "Alton Bray Colby Dunmore Elgin Fairview Garland Hanley Irvine Jasper Kenton Lowell".split()
OLD_OR_NEW = ("Old", "New")
TRADES = "baker cook doctor farmer gardener judge lawyer miner nurse painter pilot sailor tailor teacher writer".split()
PEOPLE = (1, 4)
"""In a paragraph, at least and at most."""
LONG_EVERY, LONG_PEOPLE = 16, 7
"""Each so manyth paragraph has so many people and does not fit into one window."""
PARAGRAPHS = {"train": 4000, "test": 150}


class Person(NamedTuple):
    """What a sentence says."""

    name: str
    town: str
    trade: str

    def sentence(self) -> str:
        """Return the sentence."""
        return f"{self.name} lives in {self.town}."

    def asked(self) -> Tuple[Tuple[str, str], ...]:
        """Return questions and answers."""
        return (
            (f"Where does {self.name} live?", self.town),
            (f"Who lives in {self.town} now?", self.name),
        )


def paragraphs(part: str, seed: int) -> List[Paragraph]:
    """Return those of ``train`` or ``test``, drawn from ``seed``: the same each time, other ones in each part."""
    draw = random.Random(f"{part} {seed}")
    return [_paragraph(draw, f"{part}-{number}", number) for number in range(PARAGRAPHS[part])]


def _paragraph(draw: random.Random, name: str, number: int) -> Paragraph:
    count = LONG_PEOPLE if number % LONG_EVERY == LONG_EVERY - 1 else draw.randint(*PEOPLE)
    firsts, towns, trades = (draw.sample(each, count) for each in (FIRST_NAMES, TOWNS, TRADES))
    people = [
        Person(first, f"{draw.choice(OLD_OR_NEW)} {town}", trade) for first, town, trade in zip(firsts, towns, trades)
    ]
    sentences = [person.sentence() for person in people]
    context, begins = " ".join(sentences), [0]
    for sentence in sentences[:-1]:
        begins.append(begins[-1] + len(sentence) + 1)
    questions = [
        Question(f"{name}-{place}-{each}", text, (Answer(answer, begin + sentence.index(answer)),))
        for place, (person, sentence, begin) in enumerate(zip(people, sentences, begins))
        for each, (text, answer) in enumerate(person.asked())
    ]
    return Paragraph(context, tuple(questions))
