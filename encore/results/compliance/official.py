"""Run mlperf-logging's compliance checker in this process and translate its messages.

Differences from ``python -m mlperf_logging.compliance_checker``: line numbers refer to the file, all events on a
line are checked, and all messages are kept instead of one per key.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from encore.results.findings import Finding, Severity
from encore.results.logs.reader import Event

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

_HINTS = {
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
    """Return a rule's test as a phrase, such as "lars_epsilon: value equal to 0.0"."""
    text = " ".join(test.split())
    phrase = _PHRASES.get(text, text)
    for pattern, replacement in _REWRITES if phrase == text else ():
        phrase = pattern.sub(replacement, phrase)
    return f"{'at least one ' if any_event else ''}{key}: {phrase.strip()}"


def hint_for(key: str, *, often: str | None = None) -> str:
    """Return the fix for a finding on ``key``. ``often``: required number of events, if the event is missing."""
    for name in key.split(" or "):
        if name in _HINTS:
            return _HINTS[name]
    if often:
        return f"log {key} {often}, from rank 0"
    return f"bring {key} within the round's rules, or submit to the open division" if key else "read the log there"


_LINE = re.compile(r"in line (\d+):|^line (\d+)$", re.MULTILINE)
_TEST = re.compile(r"^failed test:(.*)$", re.MULTILINE)
_EXECUTING = re.compile(r"Failed executing CHECK code:\n(.*?)\ntriggered by line:", re.DOTALL)
_REQUIRED = re.compile(
    r"Required (EXACTLY_ONE|AT_LEAST_ONE|AT_LEAST\(\d+\)) occurrence of (.+?)(?: but found (\d+)(.*))?$"
)
_FAILED_ALL = re.compile(r"Failed checks for (\w+) : (.*)", re.DOTALL)
# The checker takes them from a set in random order: the same rule can fail twice.
_ALTERNATIVES = re.compile(r"(?<= occurrence of )'\w+'(?: or '\w+')+$")
_CONFIG = re.compile(r"training_\d+\.\d+\.\d+/[a-z0-9_]+\.yaml")
_PER_KEY = 20
_PLACE = frozenset({"file", "lineno"})
TARGET_NOT_MET = "target_not_met"  # Code of the finding that no evaluation reaches the quality target
SEQUENCE_LENGTH = "sequence_length"  # Code of the finding about a different sequence length


def version() -> str:
    return f"mlperf-logging {importlib.metadata.version('mlperf-logging')}"


def rulesets() -> tuple[str, ...]:
    """Return the training rulesets the installed mlperf-logging has, such as ``0.7.0``."""
    names = (folder.name.removeprefix("training_") for folder in _checker_folder().glob("training_*"))
    return tuple(sorted(name for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name)))


def check_events(events: Sequence[Event], ruleset: str, benchmark: str | None) -> list[Finding]:
    """Return the official findings about ``events``; a crash of the checker is a finding as well."""
    from mlperf_logging.compliance_checker import mlp_compliance

    collector = _collector_class()("training", ruleset, False, False)
    # 0.6.0 has separate rules for Minigo, which are not included by other rule files.
    uses_minigo_rules = ruleset == "0.6.0" and benchmark == "minigo"
    config = f"training_{ruleset}/{'minigo' if uses_minigo_rules else 'common'}.yaml"
    original, original_yaml = mlp_compliance.enqueue_config, mlp_compliance.yaml
    # Replacement for the yaml module: parses rule files only once
    cached_yaml = SimpleNamespace(BaseLoader=None, load=lambda file, Loader: _load_rules(file.name))
    rejected: list[str] = []

    def enqueue(name: object) -> None:
        # Rule files build this name from values in the log, and the named file is executed.
        if isinstance(name, str) and _CONFIG.fullmatch(name) and (_checker_folder() / name).is_file():
            original(name)
        else:
            rejected.append(str(name))

    crash = None
    mlp_compliance.enqueued_configs.clear()
    try:
        mlp_compliance.enqueued_configs.append(config)
        lines = _log_lines(events, ruleset)
        mlp_compliance.enqueue_config, mlp_compliance.yaml = enqueue, cached_yaml
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            while mlp_compliance.enqueued_configs:
                rules = _checker_folder() / mlp_compliance.enqueued_configs.pop(0)
                collector.configured_checks(lines, str(rules))
    except Exception as error:
        crash = Finding(
            line=None,
            rule=f"mlperf-logging training_{ruleset}",
            expected="a verdict of the checker",
            found=f"the checker failed on this log: {type(error).__name__}: {str(error)[:200]}",
            hint="correct the other findings first; if none is left, report the log to mlcommons/logging",
            kind="crash",
        )
    finally:
        mlp_compliance.enqueue_config, mlp_compliance.yaml = original, original_yaml
        mlp_compliance.enqueued_configs.clear()
    findings = [
        _finding(key, message, severity, ruleset) for key, message, severity in dict.fromkeys(collector.messages)
    ]
    findings += [
        Finding(
            line=None,
            rule=f"mlperf-logging training_{ruleset}: one rule file per benchmark, division and optimizer",
            expected="a benchmark, division and optimizer that the round had",
            found=f"the log leads to rules that do not exist: {name[:200]}",
            hint="log submission_benchmark, submission_division and opt_name as the round spells them",
        )
        for name in rejected
    ]
    return [*findings, crash] if crash else findings


@functools.cache
def _load_rules(path: str) -> Any:
    yaml = importlib.import_module("yaml")
    return yaml.load(Path(path).read_text("utf-8"), Loader=yaml.BaseLoader)


# All words in the rule files: events with other keys are not used by any rule.
@functools.cache
def _rule_words(ruleset: str) -> frozenset[str]:
    files = (_checker_folder() / f"training_{ruleset}").glob("*.yaml")
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text("utf-8")))


@functools.cache
def _checker_folder() -> Path:
    spec = importlib.util.find_spec("mlperf_logging.compliance_checker")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("mlperf_logging.compliance_checker")
    return Path(spec.origin).parent


@functools.cache
def _collector_class() -> Any:
    from mlperf_logging.compliance_checker.mlp_compliance import ComplianceChecker

    class Collector(ComplianceChecker):  # type: ignore[misc]
        """Keeps all messages; the original keeps the last one per key."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.messages: list[tuple[str | None, str, Severity]] = []

        # The rules' code and the original call these three by name.
        def put_message(self, msg: str, key: str | None = None) -> None:
            msg = _ALTERNATIVES.sub(lambda match: " or ".join(sorted(match[0].split(" or "))), msg)
            if sum(1 for message_key, _, _ in self.messages if message_key == key) < _PER_KEY:
                self.messages.append((key, msg, "error"))

        def put_warning(self, msg: str, key: str) -> None:
            self.messages.append((key, msg, "warning"))

        def overwrite_messages(self, keys: Sequence[str]) -> None:
            self.messages = [entry for entry in self.messages if entry[0] not in keys or entry[2] == "warning"]

    return Collector


def _log_lines(events: Sequence[Event], ruleset: str) -> list[Any]:
    parser = importlib.import_module(f"mlperf_logging.compliance_checker.mlp_parser.ruleset_{ruleset.replace('.', '')}")
    known_keys = _rule_words(ruleset)
    return [
        parser.LogLine(
            f"line {event.line}",
            (event.time_s or 0.0) * (1 if event.dialect == "mll" else 1000),
            event.key,
            # The checker only looks things up in metadata, so a plain dict of it is all it needs.
            {"value": event.value, "metadata": dict(event.metadata)},
            event.line,
        )
        for event in events
        if event.key in known_keys
    ]


# Translate a message of the checker; unknown messages are passed through.
def _finding(key: str | None, message: str, severity: Severity, ruleset: str) -> Finding:
    rule_file = f"mlperf-logging training_{ruleset}"
    lines = _LINE.search(message)
    line = int(lines[1] or lines[2]) if lines else None
    if required := _REQUIRED.search(message):
        return _count_finding(required, rule_file, severity)
    failed_all = _FAILED_ALL.search(message)
    test = _TEST.search(message) or _EXECUTING.search(message)
    if failed_all or test:
        name = failed_all[1] if failed_all else key or "end of log"
        text = failed_all[2] if failed_all else test[1] if test else ""
        value = "no such event in the log" if failed_all else _quoted_value(message)
        target_code = TARGET_NOT_MET if failed_all and name == "eval_accuracy" else ""
        return Finding(
            line=line,
            code=SEQUENCE_LENGTH if name == "max_sequence_length" else target_code,
            rule=f"{rule_file}, {name}: {' '.join(text.split())}",
            expected=expectation(name, text, any_event=bool(failed_all)),
            found=value,
            hint=hint_for(name),
            severity=severity,
        )
    return Finding(
        line=line,
        rule=f"{rule_file}, {key or 'log'}",
        expected="a log that the rule can be applied to",
        found=" ".join(message.split())[:300],
        hint=hint_for(key or ""),
        severity=severity,
    )


def _count_finding(required: re.Match[str], rule_file: str, severity: Severity) -> Finding:
    phrase = {"EXACTLY_ONE": "exactly one", "AT_LEAST_ONE": "at least one"}.get(required[1], required[1].lower())
    often = "once" if required[1] == "EXACTLY_ONE" else "at least once"
    name, count = required[2].replace("'", ""), required[3] or "0"
    return Finding(
        line=None,
        rule=f"{rule_file}, {name}: {required[1]}",
        expected=f"{phrase} {name} event",
        found=f"{count} of them {(required[4] or '').strip()}".strip() if count != "0" else f"no {name} event",
        hint=hint_for(name, often=often if count == "0" else None),
        severity=severity,
    )


# Value of the event in a message, and its metadata except for the source location
def _quoted_value(message: str) -> str:
    _, _, after = message.partition("current line[v]=")
    try:
        event, _ = json.JSONDecoder().raw_decode(after.strip())
        value, metadata = json.dumps(event["value"]), event["metadata"]
    except (ValueError, KeyError, TypeError):
        return " ".join(after.split())[:300] if after else "an event on which the rule cannot be evaluated"
    other_metadata = {name: item for name, item in metadata.items() if name not in _PLACE}
    suffix = f", metadata {json.dumps(other_metadata)}" if other_metadata else ""
    return f"value {value}{suffix}"[:300]
