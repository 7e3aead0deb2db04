"""Wikitext to paragraphs of plain text: what WikiExtractor, which the reference uses, keeps of an article.

Kept: running text, the words of links, bold and italic words. Left out: templates, tables, references, comments,
files, categories, lists, headings, galleries and mathematics. WikiExtractor expands templates with the definitions in
the dump; here the few that stand for words within a sentence, such as a converted length, are replaced by these.
mwparserfromhell takes ten times as long (1.2 and 11.6 MB/s of 106 articles, one core) and knows no templates either.
"""

from __future__ import annotations

import html
import re
from typing import Callable, Dict, List, Match, Sequence

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_DROPPED = (
    "gallery|timeline|noinclude|pre|table|tr|td|th|caption|div|form|input|select|option|textarea|ul|li|ol|dl|dt|dd|menu"
    "|dir|ref|references|img|imagemap|source|syntaxhighlight|small|math|chem|score|graph|mapframe|indicator|includeonly"
)
_SELF_CLOSING = re.compile(rf"<(?:{_DROPPED}|section|templatestyles|nowiki|br|hr|wbr)\b[^<>]*/>", re.IGNORECASE)
_ELEMENT = re.compile(rf"<({_DROPPED})\b[^<>]*>(?:(?!<\1\b).)*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_TEMPLATE_WITH_BRACES = re.compile(r"\{\{((?:[^{}]|\{(?!\{)|\}(?!\}))*)\}\}")
_PARAMETER = re.compile(r"\{\{\{[^{}]*\}\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_EXTERNAL = re.compile(r"\[(?:https?:|ftp:|mailto:|news:|irc:)?//[^\s\[\]]*[ \t]*([^\[\]]*)\]", re.IGNORECASE)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_LINK_WITH_BRACKETS = re.compile(r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*)\]\]")
_NAMESPACE = re.compile(
    r"\s*(?:file|image|media|category|template|wikipedia|help|portal|user|talk|special|module|draft|mediawiki"
    r"|commons|meta|wikt|wiktionary|wikisource|wikibooks|wikiquote|[a-z]{2,3}(?:-[a-z-]+)?|simple)\s*:",
    re.IGNORECASE,
)
_KEPT_NAMESPACE = re.compile(r"\s*(?:w|wikt|wiktionary)\s*:\s*", re.IGNORECASE)
_QUOTES = re.compile(r"'{2,}")
_POSSESSIVE = re.compile(r"(?<!')''([^'\n]+)'''s\b")
_SWITCH = re.compile(r"__[A-Z]+__")
_HEADING = re.compile(r"^(=+).*\1\s*$")
_EMPTY = re.compile(r"[(\[][\s,;:.–—-]*[)\]]")
_AFTER_OPENING = re.compile(r"([(\[])[\s,;]+")
_BEFORE_MARK = re.compile(r"\s+([,;:.)\]])")
_SPACES = re.compile(r"[ \t\xa0\u2002-\u200b]+")
LEAST_LETTERS = 2
MOST_PASSES = 40  # depth of what is within each other; deeper markup is left as it is and its lines are dropped


def paragraphs(text: str) -> List[str]:
    """Return the paragraphs of an article's wikitext, each one line."""
    text = _COMMENT.sub("", text)
    text = _SELF_CLOSING.sub(" ", text)
    text = _all(text, (_ELEMENT,), lambda match: "")
    text = _PARAMETER.sub("", text)
    text = _all(text, (_TEMPLATE, _TEMPLATE_WITH_BRACES), _template)
    text = _all(text, (_TABLE,), lambda match: "")
    text = _EXTERNAL.sub(r"\1", text)
    text = _all(text, (_LINK, _LINK_WITH_BRACKETS), _link)
    text = _POSSESSIVE.sub(r"\1's", text)
    text = _SWITCH.sub("", _QUOTES.sub("", text))
    # Entities after tags: what an article shows as <b> is text.
    text = html.unescape(_TAG.sub("", text))
    found = (_clean_line(line) for line in text.splitlines() if _is_prose(line))
    return [line for line in found if sum(map(str.isalnum, line)) >= LEAST_LETTERS]


def _all(text: str, patterns: Sequence["re.Pattern[str]"], replace: Callable[[Match[str]], str]) -> str:
    # Replace from the inside out.
    for pattern in patterns:
        for _ in range(MOST_PASSES):
            text, count = pattern.subn(replace, text)
            if not count:
                break
    return text


def _is_prose(line: str) -> bool:
    # Return whether a line is of running text: no list, heading, rest of a table or of a template.
    stripped = line.strip()
    if not stripped or stripped[0] in "*#;:|!{}" or stripped[-1] in "{}" or stripped.startswith("----"):
        return False
    if "{{" in line or "}}" in line or "[[" in line or "{|" in line or _HEADING.match(stripped):
        return False
    return not (stripped[0] == "(" and stripped[-1] == ")")


def _clean_line(line: str) -> str:
    line = _SPACES.sub(" ", line)
    line = _EMPTY.sub("", line)
    line = _AFTER_OPENING.sub(r"\1", line)
    line = _BEFORE_MARK.sub(r"\1", line)
    return _SPACES.sub(" ", line).replace(",,", ",").replace(",.", ".").strip()


# -- links -----------------------------------------------------------------------------------------------------


def _link(match: "re.Match[str]") -> str:
    # Return the words of a link: its last part, or its target.
    target, _, rest = match.group(1).partition("|")
    if target.startswith(":"):
        target = target[1:]
    elif _KEPT_NAMESPACE.match(target):
        target = _KEPT_NAMESPACE.sub("", target, count=1)
    elif _NAMESPACE.match(target):
        return ""
    return (rest.rsplit("|", 1)[-1] or target).strip() if rest else target.strip()


# -- templates -------------------------------------------------------------------------------------------------


def _template(match: "re.Match[str]") -> str:
    name, *arguments = match.group(1).split("|")
    name = " ".join(name.split()).lower().replace("_", " ")
    if name.startswith("lang-"):
        return _argument(arguments, 0)
    known = _TEMPLATES.get(name)
    return known(arguments) if known else ""


def _argument(arguments: Sequence[str], place: int) -> str:
    # Return an argument that has no name, or one that is named by its place.
    unnamed = [each.strip() for each in arguments if "=" not in each]
    named = [
        value.strip()
        for key, mark, value in (each.partition("=") for each in arguments)
        if mark and key.strip() == str(place + 1)
    ]
    return named[0] if named else unnamed[place] if place < len(unnamed) else ""


def _nth(place: int) -> Callable[[Sequence[str]], str]:
    return lambda arguments: _argument(arguments, place)


def _constant(text: str) -> Callable[[Sequence[str]], str]:
    return lambda arguments: text


def _convert(arguments: Sequence[str]) -> str:
    # Return number and unit as they are given: ``{{convert|5|km|mi}}`` is "5 km".
    first, second, third, fourth = (_argument(arguments, place) for place in range(4))
    if second in ("-", "–", "to", "and", "by", "x", "×", "or", "to about"):
        return f"{first}{second}{third} {fourth}" if second in "-–" else f"{first} {second} {third} {fourth}"
    return f"{first} {second}"


_TEMPLATES: Dict[str, Callable[[Sequence[str]], str]] = {
    **dict.fromkeys(("convert", "cvt"), _convert),
    **dict.fromkeys(
        ("nowrap", "nobr", "small", "smaller", "big", "em", "abbr", "tooltip", "sic", "visible anchor", "vanchor"),
        _nth(0),
    ),
    **dict.fromkeys(("nihongo", "transl", "transliteration", "formatnum", "formatnum:", "as of", "quote"), _nth(0)),
    **dict.fromkeys(("lang", "color", "font color"), _nth(1)),
    **dict.fromkeys(("ndash", "en dash", "–", "snd", "spnd", "spaced ndash"), _constant(" – ")),
    **dict.fromkeys(("mdash", "em dash", "—"), _constant("—")),
    **dict.fromkeys(("'", "'s"), _constant("'s")),
    **dict.fromkeys(("nbsp", "·", "•", "dot"), _constant(" ")),
}
