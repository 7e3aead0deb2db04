"""Toy data set: English text included in every Python, one document per module and per chapter of the reference.

Docstrings of the standard library, and the language reference that help() prints (pydoc_data.topics). The text
depends on Python's version, which is in the manifest; for one version and distribution it is the same on all
machines. No text common to all versions is long enough.
"""

import ast
import os
import re
import sysconfig
from pathlib import Path
from typing import Iterator, List, Union

from benchmarks.common.data.problem import Problem
from benchmarks.language.sentences import sentences_of

NAME = "python-text"
LEAST_SENTENCES = 8  # minimum sentences per document: excludes modules with hardly any prose
LEAST_WORDS = 4
_Documented = Union[ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef]
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_LEFT_OUT |= {"ensurepip", "turtledemo", "lib-dynload"}
_CODE = re.compile(r"^\s*(>>>|\.\.\. |\.\. |[-=+*#~^_|]{3,}|:\w+)|[{}\\<>]|\w\(.*\)\s*$|\w = \w|::=")
_MARKS = re.compile(r"[*`]{1,2}([^*`]+)[*`]{1,2}")
_PROSE = re.compile(r"""^["'(]?[A-Za-z].*[.!?:)"']$""")


def write_text(path: Path) -> str:
    """Write one sentence per line with an empty line between documents; return a description of the source.

    Raises:
        Problem: this Python lacks source files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(modules(root))
    texts = ["\n\n".join(docstrings(file)) for file in files]
    # The chapters of the language reference: topics may share text.
    tree = parse(root / "pydoc_data" / "topics.py")
    topics = dict.fromkeys(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)) if tree else {}
    texts += [topic for topic in topics if isinstance(topic, str) and "\n\n" in topic]
    documents = list(filter(None, map(_document, texts)))
    if not documents:
        raise Problem(
            f"{root} contains no English text",
            "the docstrings of Python's standard library",
            "use a Python whose standard library is installed as .py files, or pass a text as the raw data",
        )
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\n\n".join("\n".join(document) for document in documents) + "\n")
    return f"docstrings of {len(files):,} modules and the language reference of Python"


def modules(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def docstrings(path: Path) -> List[str]:
    # Return the docstrings of a module and of what it defines; empty strings where there is none.
    tree = parse(path)
    return [ast.get_docstring(node) or "" for node in (documented(tree) if tree else ())]


def documented(node: _Documented) -> Iterator[_Documented]:
    # Yield a module, class or function and nested ones; functions inside "if" are skipped.
    yield node
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from documented(child)


def parse(path: Path) -> "ast.Module | None":
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # skip broken files in a distribution


def _document(text: str) -> List[str]:
    # Return the sentences of a text; none if there are few. One repeated in many methods would be memorized.
    once = dict.fromkeys(sentence for part in re.split(r"\n\s*\n", text) for sentence in _sentences(part))
    return list(once) if len(once) >= LEAST_SENTENCES else []


def _sentences(paragraph: str) -> Iterator[str]:
    # Yield the sentences in a prose paragraph; skips code, tables and titles.
    lines = paragraph.splitlines()
    if any(_CODE.search(line) for line in lines) or paragraph.startswith("    "):
        return
    for sentence in sentences_of(_MARKS.sub(r"\1", " ".join(paragraph.split()))):
        if _PROSE.match(sentence) and len(sentence.split()) >= LEAST_WORDS:
            yield sentence
