"""Criteo's text format, read without a Python loop over rows.

A row is a label, 13 integers and 26 hexadecimal values, separated by tabs; any of them but the label may be
empty. The Terabyte logs (day_0 to day_23) and Kaggle's train.txt have it alike.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np

from benchmarks.dlrm.blocks import COLUMNS, FIRST_TABLE, NUMBERS, WORD

TAB, NEWLINE, RETURN, MINUS = 9, 10, 13, 45
NUMBER_DIGITS = 10  # characters of the largest number next to its sign: the logs' counts fit in 32 bits
HEX_DIGITS = 8
MAX_INT = 2**31 - 1

_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


class Rows(NamedTuple):
    """The well-formed rows of a piece of text."""

    # (COLUMNS, rows) int32: label, numbers as they are (0 where empty), categories modulo the index limit.
    columns: np.ndarray
    lines: int  # lines of the text, malformed ones included
    malformed: int
    first_malformed: int  # number of the first malformed line, from 0; -1 when there is none


def parse(text: bytes, index_limit: int) -> Rows:
    """Read whole lines; what is no row is counted and left out. The last line needs its newline."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    begins = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1)) if len(ends) else ends
    tabs = np.flatnonzero(data == TAB)
    first_tab = np.searchsorted(tabs, begins)
    good = np.searchsorted(tabs, ends) - first_tab == COLUMNS - 1
    rows = np.flatnonzero(good)
    inner = tabs[first_tab[rows][:, None] + np.arange(COLUMNS - 1)]
    # Windows' line ends.
    stops = ends[rows] - (data[np.maximum(ends[rows] - 1, 0)] == RETURN)
    starts = np.concatenate((begins[rows][:, None], inner + 1), axis=1)
    lengths = np.concatenate((inner, stops[:, None]), axis=1) - starts
    values, valid = _values(data, starts, lengths, index_limit)
    good[rows] = valid
    malformed = np.flatnonzero(~good)
    first = int(malformed[0]) if len(malformed) else -1
    return Rows(np.ascontiguousarray(values[valid].T), len(ends), len(malformed), first)


# Values (rows, COLUMNS) of the fields, and which rows are valid.
def _values(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, index_limit: int
) -> Tuple[np.ndarray, np.ndarray]:
    values = np.zeros(starts.shape, np.int32)
    labels = data[starts[:, 0]] if len(starts) else np.zeros(0, np.uint8)
    valid = (lengths[:, 0] == 1) & ((labels == 48) | (labels == 49))
    values[:, 0] = labels == 49
    numbers = slice(1, FIRST_TABLE)
    values[:, numbers], fine = _decimal(data, starts[:, numbers], lengths[:, numbers])
    valid &= fine.all(axis=1)
    categories = slice(FIRST_TABLE, COLUMNS)
    hashes, fine = _hexadecimal(data, starts[:, categories], lengths[:, categories])
    values[:, categories] = hashes % np.uint32(index_limit)
    return values, valid & fine.all(axis=1)


# The characters ``place`` before the end of each field; anything where that is before the text.
def _characters(data: np.ndarray, ends: np.ndarray, place: int) -> np.ndarray:
    return data[np.maximum(ends - 1 - place, 0)]


def _decimal(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    negative = (lengths > 0) & (data[np.minimum(starts, len(data) - 1)] == MINUS)
    digits = lengths - negative
    fine = (digits <= NUMBER_DIGITS) & ((digits > 0) | (lengths == 0))
    total = np.zeros(starts.shape, np.int64)
    ends = starts + lengths
    for place in range(min(NUMBER_DIGITS, int(digits.max(initial=0)))):
        inside = place < digits
        digit = _characters(data, ends, place) - np.uint8(48)
        fine &= ~inside | (digit < 10)
        total += np.where(inside, digit, 0).astype(np.int64) * 10**place
    fine &= total <= MAX_INT
    return np.where(negative, -total, total).clip(-MAX_INT, MAX_INT).astype(np.int32), fine


# A missing value counts as 0, as in the reference's preparation.
def _hexadecimal(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    fine = lengths <= HEX_DIGITS
    total = np.zeros(starts.shape, np.uint32)
    ends = starts + lengths
    for place in range(min(HEX_DIGITS, int(lengths.max(initial=0)))):
        inside = place < lengths
        digit = _HEX[_characters(data, ends, place)]
        fine &= ~inside | (digit < 16)
        total |= np.where(inside, digit, 0).astype(np.uint32) << np.uint32(4 * place)
    return total, fine


def transformed(column: int, values: np.ndarray) -> np.ndarray:
    """Values of a column as training reads them: numbers become log(1 + x), negative ones count as 0."""
    if 1 <= column <= NUMBERS:
        return np.log1p(np.maximum(values, 0), dtype=np.float32)
    return values.astype(WORD, copy=False)
