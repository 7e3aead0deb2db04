"""Validation against the published schemas, stricter than for a reader: unknown fields are errors."""

import json
from functools import cache
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


def validate_run(folder: Path) -> None:
    # Validate all files with a schema
    names = {
        "run.json": "run",
        "system.json": "system",
        "gate.json": "run-gate",
        "**/config.json": f"config-{json.loads((folder / 'run.json').read_text(encoding='utf-8'))['name']}",
        "experiment_*/state.json": "state",
        "experiment_*/metrics.jsonl": "metrics",
        "experiment_*/telemetry*.jsonl": "telemetry",
        "experiment_*/steps/rank_*.jsonl": "steps",
    }
    found = {pattern: list(folder.glob(pattern)) for pattern in names}
    assert found["system.json"] and len(found["experiment_*/metrics.jsonl"]) == len(list(folder.glob("experiment_*")))
    for path, name in [(path, names[pattern]) for pattern, each in found.items() for path in each]:
        texts = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
        assert texts, path
        for text in texts[:MAX_LINES]:
            validate(name, json.loads(text))
