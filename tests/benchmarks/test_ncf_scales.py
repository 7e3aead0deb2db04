"""Ratings on any positive scale are read, and lines without a time in seconds are refused with what to do."""

from __future__ import annotations

import io

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.sources.ratings import parse


@pytest.mark.parametrize("header", ["", "user,item,rating,timestamp\n", "timestamp,user,item,rating\n"])
def test_any_positive_scale(header: str) -> None:
    row = "7,1,2,100\n" if header.startswith("timestamp") else "1,2,100,7\n"
    assert parse(io.BytesIO((header + row).encode()), "own.csv").times.tolist() == [7.0]


@pytest.mark.parametrize("line", ["1,2,3,2024-05-01\n", "1,2,3\n", "user,item,rating\n1,2,3\n"])
def test_times_that_are_none(line: str) -> None:
    with pytest.raises(Problem) as caught:
        parse(io.BytesIO(line.encode()), "own.csv")
    assert "timestamp" in caught.value.expected
    assert "number the lines" in caught.value.remedy
