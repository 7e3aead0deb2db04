"""The small set: paragraphs about who owns which house, and questions whose answer is in the one right sentence.

"Ada Brook has the red house. Ben Hill has the blue house. ..." with "Who has the blue house?". The houses of a paragraph
have up to four colours (sometimes six) and as many owners, so that the kind of a word does not give the answer: the
question has to be compared with each sentence.
"""

from __future__ import annotations

import random
from typing import List

from benchmarks.bert_squad.squad import Answer, Paragraph, Question

NAME = "made-questions"
FIRST_NAMES = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kim", "Leo")
LAST_NAMES = ("Brook", "Field", "Hill", "Marsh", "Stone", "Wood")
COLOURS = ("black", "blue", "brown", "green", "red", "white")
HOUSES = (1, 4)
"""In a paragraph, at least and at most."""
LONG_EVERY = 16
"""Each so manyth paragraph has a house of each colour and does not fit into one window."""
PARAGRAPHS = {"train": 4000, "test": 200}


def paragraphs(part: str, seed: int) -> List[Paragraph]:
    """Return those of ``train`` or ``test``, drawn from ``seed``: the same each time, other ones in each part."""
    draw = random.Random(f"{part} {seed}")
    return [_paragraph(draw, f"{part}-{number}", number) for number in range(PARAGRAPHS[part])]


def _paragraph(draw: random.Random, name: str, number: int) -> Paragraph:
    count = len(COLOURS) if number % LONG_EVERY == LONG_EVERY - 1 else draw.randint(*HOUSES)
    owners = [f"{first} {draw.choice(LAST_NAMES)}" for first in draw.sample(FIRST_NAMES, count)]
    colours = draw.sample(COLOURS, count)
    context, questions = "", []
    for place, (owner, colour) in enumerate(zip(owners, colours)):
        answer = Answer(owner, len(context))
        questions.append(Question(f"{name}-{place}", f"Who has the {colour} house?", (answer,)))
        context += f"{owner} has the {colour} house. "
    return Paragraph(context.rstrip(), tuple(questions))
