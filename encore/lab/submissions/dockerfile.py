"""What a submitted Dockerfile says: the image that it began with, and the variables that it sets."""

import re
import shlex

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_EARLIER = re.compile(r"\$\{?(\w+)\}?")


def _instructions(text: str) -> list[tuple[str, str]]:
    without = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\[ \t]*\n", " ", without)
    found = re.findall(r"^[ \t]*(ARG|FROM|ENV)[ \t]+(.*)$", joined, re.MULTILINE | re.IGNORECASE)
    return [(name.upper(), rest.strip()) for name, rest in found]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _expanded(text: str, known: dict[str, str]) -> str:
    return _EARLIER.sub(lambda match: known.get(match[1], match[0])[:1024], text)[:4096]


def base_image(text: str) -> str:
    """Return the image of the last FROM that is no earlier stage; empty where there is none."""
    known: dict[str, str] = {}
    stages: set[str] = set()
    base = ""
    for name, rest in _instructions(text):
        if name == "ARG" and "=" in rest:
            variable, _, value = rest.partition("=")
            known[variable.strip()] = " ".join(_words(value))
        elif name == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            image = _expanded(words[0], known) if words else ""
            base = base if image in stages else image
            stages |= {words[2]} if len(words) > 2 else set()
    return base


def environment(text: str) -> dict[str, str]:
    """Return the variables that ENV sets; of one that is set twice, the last."""
    found: dict[str, str] = {}
    for name, rest in _instructions(text):
        if name != "ENV":
            continue
        # Docker's older form has one variable, and a space in place of the sign.
        form = rest if re.match(r"\w+=", rest) else re.sub(r"^(\w+)\s+", r"\1=", rest)
        found |= dict(word.split("=", 1) for word in _words(form) if _ASSIGNMENT.match(word))
    return found
