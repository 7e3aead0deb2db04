"""Validation against the published schemas, stricter than for a reader: unknown fields are errors."""

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from encore.cli import schemas

MAX_ITEMS = 50  # Validated items per list
MAX_LINES = 1000  # Validated lines per file


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(closed(schemas.schema_of(name)))


def closed(schema: Any) -> Any:
    # Return the schema without additional properties
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    return {
        **({"additionalProperties": False} if is_object else {}),
        **{name: closed(value) for name, value in schema.items()},
    }


def validate(name: str, content: Any) -> None:
    error = best_match(validator(name).iter_errors(content[:MAX_ITEMS] if isinstance(content, list) else content))
    assert error is None, f"{name}: {error.json_path}: {error.message}"


def validate_file(name: str, path: Path) -> None:
    validate(name, json.loads(path.read_text(encoding="utf-8")))


def validate_lines(name: str, path: Path) -> None:
    with path.open(encoding="utf-8") as lines:
        records = list(islice(map(json.loads, lines), MAX_LINES))
    assert records, path
    for record in records:
        validate(name, record)


def validate_run(folder: Path) -> None:
    # Validate all files with a schema
    passport = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    validate("run", passport)
    validate_file("system", folder / "system.json")
    names = {
        "gate.json": "run-gate",
        "**/config.json": f"config-{passport['name']}",
        "experiment_*/state.json": "state",
    }
    for path, name in [(path, name) for pattern, name in names.items() for path in folder.glob(pattern)]:
        validate_file(name, path)
    for experiment in folder.glob("experiment_*"):
        validate_lines("metrics", experiment / "metrics.jsonl")
        for path in (*experiment.glob("telemetry*.jsonl"), *experiment.glob("steps/rank_*.jsonl")):
            validate_lines("steps" if path.parent.name == "steps" else "telemetry", path)
