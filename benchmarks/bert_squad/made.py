"""The toy data set: paragraphs of facts about one person in random order, with a question per fact.

"Ada has a grey cat. Ada lives in New Bray. ..." with "Where does Ada live?" and "Which animal does Ada have?". The
question determines the sentence with the answer, whose position varies. Paragraphs have only one person: small
random networks learn to compare names only after thousands of steps.
"""

import random
from typing import Callable, List, Tuple

from benchmarks.bert_squad.squad import Answer, Paragraph, Question

NAME = "made-questions"
NAMES = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jack", "Kim", "Leo")
LAST_NAMES = ("Brook", "Field", "Hill", "Marsh", "Stone", "Wood")
TOWNS = ("Alton", "Bray", "Colby", "Dunmore", "Elgin", "Garland", "Hanley", "Irvine", "Jasper", "Kenton")
TRADES = ("baker", "cook", "doctor", "farmer", "judge", "lawyer", "miner", "nurse", "painter", "pilot", "sailor")
COLOURS = ("black", "brown", "grey", "white")
ANIMALS = ("cat", "dog", "goat", "horse", "parrot", "sheep")
MEALS = ("bread", "cheese", "fruit", "porridge", "rice", "soup")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FACTS = (2, 5)  # minimum and maximum per paragraph
LONG_EVERY = 16  # every 16th paragraph has all facts and does not fit into one window
PARAGRAPHS = {"train": 2000, "test": 200}


# Kinds of facts: question, sentence, and how the answer is drawn. {} is the person, and the answer in the sentence.
KINDS: Tuple[Tuple[str, str, Callable[[random.Random], str]], ...] = (
    ("Where does {} live?", "{} lives in {}.", lambda draw: f"{draw.choice(('Old', 'New'))} {draw.choice(TOWNS)}"),
    ("What does {} work as?", "{} works as a {}.", lambda draw: draw.choice(TRADES)),
    ("Which animal does {} have?", "{} has a {}.", lambda draw: f"{draw.choice(COLOURS)} {draw.choice(ANIMALS)}"),
    ("What does {} eat?", "{} eats {} for breakfast.", lambda draw: draw.choice(MEALS)),
    ("Who knows {}?", "{} is known to {}.", lambda draw: f"{draw.choice(NAMES)} {draw.choice(LAST_NAMES)}"),
    ("When was {} born?", "{} was born on a {}.", lambda draw: draw.choice(DAYS)),
)


def paragraphs(part: str, seed: int) -> List[Paragraph]:
    """Return the paragraphs of ``train`` or ``test``, generated from ``seed``: reproducible, different in the two
    parts.
    """
    draw = random.Random(f"{part} {seed}")
    return [_paragraph(draw, f"{part}-{number}", number) for number in range(PARAGRAPHS[part])]


def _paragraph(draw: random.Random, name: str, number: int) -> Paragraph:
    count = len(KINDS) if number % LONG_EVERY == LONG_EVERY - 1 else draw.randint(*FACTS)
    person, context, questions = draw.choice(NAMES), "", []
    for index, (question, sentence, answer) in enumerate(draw.sample(KINDS, count)):
        text = answer(draw)
        # Search after the person's name: the answer may be the same name.
        start = len(context) + sentence.replace("{}", person, 1).index("{}")
        questions.append(Question(f"{name}-{index}", question.format(person), (Answer(text, start),)))
        context += sentence.format(person, text) + " "
    return Paragraph(context.rstrip(), tuple(questions))
