"""The toy data set: a synthetic language, translated to another one with rules that must be learned.

The two vocabularies are disjoint. The target language has three genders, two cases, articles and adjectives that
agree with their noun, plurals by gender, a verb in second position in main clauses (the subject follows it after an
adverb) and in last position in subordinate clauses, and infinitives at the end. Translations are unique, so BLEU 100
is possible; copying the source scores almost 0. The text depends only on the seed.
"""

from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

import numpy as np

from benchmarks.translation.vocabulary import JOIN

NAME = "made-language"
LANGUAGES = ("qaa", "qab")  # of ISO 639's codes for local use
PAIRS = {"train": 8000, "test": 400}
LEAST_WORDS, MOST_WORDS = 4, 14  # words in a source sentence, including the full stop
WORDS = {"nouns": 60, "verbs": 24, "reports": 6, "adjectives": 24, "adverbs": 10, "prepositions": 6, "names": 14}
GENDERS = 3
SYLLABLES = (("bdfklmnprst", "aeiou"), ("ghjvwxzcq", "äöüyî"))  # consonants and vowels per language
ARTICLES = {
    # definite -> case -> one per gender, then the plural
    True: {"subject": ("dör", "dü", "däs", "dü"), "object": ("dön", "dü", "däs", "dü")},
    False: {"subject": ("wön", "wöny", "wön", "vöqy"), "object": ("wönön", "wöny", "wön", "vöqy")},
}
ADJECTIVE_ENDINGS = {"subject": ("ör", "y", "äs", "ön"), "object": ("ön", "y", "äs", "ön")}
PLURALS = ("öx", "ün", "îz")  # plural endings by gender
PLURAL = 3
SINGULAR_VERB, PLURAL_VERB, INFINITIVE = "üt", "ön", "zü"
MODAL = {False: "vîl", True: "vîlön"}
THAT = "zäs"

Word = Tuple[str, str]  # (source word, target word)


class Lexicon(NamedTuple):
    words: Dict[str, Tuple[Word, ...]]
    genders: Tuple[int, ...]  # per noun; names have the first one


class Phrase(NamedTuple):
    # A noun with article and perhaps an adjective, or a name, in tokens.

    source: List[str]
    subject: List[str]  # of the target
    object: List[str]  # of the target
    is_plural: bool = False


def write_text(folder: Path, seed: int) -> None:
    # Write train and test in both languages, with words split by BPE marks.
    random = np.random.RandomState(seed % 2**32)
    lexicon = _lexicon(random)
    seen_lines: Set[str] = set()
    for part, count in PAIRS.items():
        pairs: List[Tuple[str, str]] = []
        while len(pairs) < count:
            source, target = _sentence(random, lexicon)
            text = " ".join(source)
            word_count = sum(not token.endswith(JOIN) for token in source)
            # A test sentence that was trained on would test memory.
            if LEAST_WORDS <= word_count <= MOST_WORDS and text not in seen_lines:
                seen_lines.add(text)
                pairs.append((text, " ".join(target)))
        for language, lines in zip(LANGUAGES, zip(*pairs)):
            with (folder / f"{part}.{language}").open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(line + "\n" for line in lines)


def _lexicon(random: np.random.RandomState) -> Lexicon:
    taken_words: Set[str] = {"the", "a", "will", "that", "in"}
    words_of_class = {}
    for kind, count in WORDS.items():
        words_of_class[kind] = tuple(
            (_word(random, SYLLABLES[0], taken_words), _word(random, SYLLABLES[1], taken_words)) for _ in range(count)
        )
    return Lexicon(words_of_class, tuple(int(gender) for gender in random.randint(GENDERS, size=WORDS["nouns"])))


def _word(random: np.random.RandomState, letters: Sequence[str], taken_words: Set[str]) -> str:
    consonants, vowels = letters
    while True:
        syllables = range(random.randint(2, 4))
        word = "".join(
            consonants[random.randint(len(consonants))] + vowels[random.randint(len(vowels))] for _ in syllables
        )
        if word not in taken_words:
            taken_words.add(word)
            return word


def _sentence(random: np.random.RandomState, lexicon: Lexicon) -> Tuple[List[str], List[str]]:
    # Return the tokens for a sentence and the translation.
    kind = random.randint(4)
    subject, verb, rest, rest_target = _clause(random, lexicon)
    source, target = subject.source, subject.subject
    finite_source, finite = _verb(verb, subject.is_plural)
    if kind == 0:
        source, target = [*source, *finite_source, *rest], [*target, *finite, *rest_target]
    elif kind == 1:
        adverb = _pick(random, lexicon.words["adverbs"])
        source = [adverb[0], ",", *source, *finite_source, *rest]
        target = [adverb[1], *finite, *target, *rest_target]
    elif kind == 2:
        source = [*source, "will", verb[0], *rest]
        target = [*target, MODAL[subject.is_plural], *rest_target, verb[1] + JOIN, INFINITIVE]
    else:
        speaker = _phrase(random, lexicon)
        said_source, said_target = _verb(_pick(random, lexicon.words["reports"]), speaker.is_plural)
        source = [*speaker.source, *said_source, "that", *source, *finite_source, *rest]
        target = [*speaker.subject, *said_target, ",", THAT, *target, *rest_target, *finite]
    return [*source, "."], [*target, "."]


def _clause(random: np.random.RandomState, lexicon: Lexicon) -> Tuple[Phrase, Word, List[str], List[str]]:
    # Return subject, verb, and the rest in both languages.
    subject, thing = _phrase(random, lexicon), _phrase(random, lexicon)
    verb = _pick(random, lexicon.words["verbs"])
    if random.random_sample() >= 0.4:
        return subject, verb, thing.source, thing.object
    location, preposition = _phrase(random, lexicon), _pick(random, lexicon.words["prepositions"])
    # In the target language, place precedes object.
    rest_target = [preposition[1], *location.object, *thing.object]
    return subject, verb, [*thing.source, preposition[0], *location.source], rest_target


def _phrase(random: np.random.RandomState, lexicon: Lexicon) -> Phrase:
    if random.random_sample() < 0.25:
        name, other = _pick(random, lexicon.words["names"])
        return Phrase([name], [other], [other])
    noun_index = random.randint(WORDS["nouns"])
    described = [_pick(random, lexicon.words["adjectives"])] if random.random_sample() < 0.4 else []
    is_plural, is_definite = random.random_sample() < 0.4, random.random_sample() < 0.6
    (noun, other), gender = lexicon.words["nouns"][noun_index], lexicon.genders[noun_index]
    article = ["the"] if is_definite else [] if is_plural else ["a"]
    source = [*article, *(adjective for adjective, _ in described), *([noun + JOIN, "s"] if is_plural else [noun])]
    form = PLURAL if is_plural else gender
    nouns = [other + JOIN, PLURALS[gender]] if is_plural else [other]

    def target(case: str) -> List[str]:
        adjectives = [part for _, word in described for part in (word + JOIN, ADJECTIVE_ENDINGS[case][form])]
        return [ARTICLES[is_definite][case][form], *adjectives, *nouns]

    return Phrase(source, target("subject"), target("object"), is_plural)


def _pick(random: np.random.RandomState, words: Sequence[Word]) -> Word:
    return words[random.randint(len(words))]


def _verb(verb: Word, is_plural: bool) -> Tuple[List[str], List[str]]:
    source = [verb[0]] if is_plural else [verb[0] + JOIN, "s"]
    return source, [verb[1] + JOIN, PLURAL_VERB if is_plural else SINGULAR_VERB]
