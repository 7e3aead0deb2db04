"""Turn the expressions of mlperf-logging's rule files into sentences, and name a remedy for each key."""

from __future__ import annotations

import re

_PHRASES = {
    "s['init_started']": "an init_start before it",
    "s['init_stopped']": "an init_stop before it",
    "( s['init_stopped'] == True )": "an init_stop before it",
    "s['init_stopped'] == True": "an init_stop before it",
    "not s['init_stopped']": "no init_stop before it",
    "not s['run_started']": "no run_start before it",
    "s['run_started']": "a run_start before it",
    "ll.timestamp - s['first_init_start'] < (20*60*1e3)": "less than 20 minutes after the first init_start",
    "'value' in v": "a value",
    "v['value'] != ''": "a value that is not empty",
    "v['value'] > 0": "a value above 0",
    "v['value'] >= 0": "a value of 0 or more",
    "v['value'] >= 1": "a value of 1 or more",
    "is_integer(math.log2(v['value'] / 0.0001))": "0.0001 times a power of two",
    "is_integer(v['value'] / 0.001)": "a multiple of 0.001",
    "is_integer(v['value'] / 0.02)": "a multiple of 0.02",
}
_REWRITES = (
    (re.compile(r"\bv\['value'\]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\bv\['metadata'\]\['(\w+)'\]"), r"metadata \1"),
    (re.compile(r"'(\w+)' in v\['metadata'\]"), r"metadata with \1"),
    (re.compile(r"'(\w+)' in v\['value'\]"), r"a value with \1"),
    (re.compile(r"\bv\['value'\]"), "value"),
    (re.compile(r"\bs\['(\w+)'\]"), r"\1"),
    (re.compile(r"\bll\.timestamp\b"), "time"),
    (re.compile(r"\bis_integer\((.*)\)"), r"a whole number in \1"),
    (re.compile(r"\bin \[(.*?)\]"), r"one of \1"),
    (re.compile(r">="), "at least"),
    (re.compile(r"<="), "at most"),
    (re.compile(r"=="), "equal to"),
    (re.compile(r"!="), "other than"),
    (re.compile(r">"), "above"),
    (re.compile(r"<"), "below"),
    (re.compile(r"\s+"), " "),
)

_REMEDIES = {
    "eval_accuracy": "train until the target is reached; a run that stops before it has no time",
    "run_start": "log run_start once, from rank 0, after init_stop and before the first data is touched",
    "run_stop": "log run_stop once, from rank 0, with metadata status success or aborted",
    "init_start": "log init_start first of all, before any framework work",
    "init_stop": "log init_stop once, from rank 0, at most 20 minutes after init_start",
    "cache_clear": "drop the page cache before the run, log cache_clear true, and only then init_start",
    "submission_benchmark": "log the benchmark's name as the round spells it, such as resnet or maskrcnn",
    "submission_division": "log submission_division closed or open",
    "submission_status": "log submission_status cloud, onprem, preview or research, as the round has it",
    "submission_org": "log the name of the organisation",
    "submission_platform": "log the system, such as 1xDGX-A100",
    "train_samples": "log the number of training samples once",
    "eval_samples": "log the number of evaluation samples once",
    "epoch_start": "log epoch_start with metadata epoch_num, counted from 1",
    "epoch_stop": "log epoch_stop, or block_stop, at the end of each epoch or block, from rank 0",
    "block_start": "log block_start with metadata first_epoch_num and epoch_count",
}


def expectation(key: str, test: str, *, any_event: bool = False) -> str:
    """Return the test of a rule as a sentence part, such as "lars_epsilon: value equal to 0.0"."""
    text = " ".join(test.split())
    phrase = _PHRASES.get(text)
    if phrase is None:
        phrase = text
        for pattern, replacement in _REWRITES:
            phrase = pattern.sub(replacement, phrase)
    return f"{'at least one ' if any_event else ''}{key}: {phrase.strip()}"


def remedy_for(key: str, *, often: str | None = None) -> str:
    """Return what to do about a finding on ``key``; ``often``: how often the rule wants it, where it is missing."""
    for name in key.split(" or "):
        if name in _REMEDIES:
            return _REMEDIES[name]
    if often:
        return f"log {key} {often}, from rank 0"
    return f"bring {key} within the round's rules, or submit to the open division" if key else "read the log there"
