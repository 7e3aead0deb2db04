"""Files and outputs held against the published schemas, more strictly than a reader may: no unknown field."""

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from encore.cli import schemas

MOST = 50  # Items of a list that are looked at


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(closed(schemas.schema_of(name)))


def closed(schema: Any) -> Any:
    # The schema that allows no field which it does not name
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def validate(name: str, content: Any) -> None:
    looked_at = content[:MOST] if isinstance(content, list) else content
    wrong = best_match(validator(name).iter_errors(looked_at))
    assert wrong is None, f"{name}: {wrong.json_path}: {wrong.message}"


def validate_file(name: str, path: Path) -> None:
    validate(name, json.loads(path.read_text(encoding="utf-8")))


def validate_lines(name: str, path: Path) -> None:
    with path.open(encoding="utf-8") as lines:
        found = list(islice(map(json.loads, lines), 1000))
    assert found, path
    for each in found:
        validate(name, each)


def validate_run(folder: Path) -> None:
    """Hold every file of a run folder that has a schema against it."""
    passport = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    validate("run", passport)
    validate_file("system", folder / "system.json")
    for gate in folder.glob("gate.json"):
        validate_file("run-gate", gate)
    for config in folder.rglob("config.json"):
        validate_file(f"config-{passport['name']}", config)
    for experiment in folder.glob("experiment_*"):
        validate_file("state", experiment / "state.json")
        validate_lines("metrics", experiment / "metrics.jsonl")
        for path in experiment.glob("telemetry*.jsonl"):
            validate_lines("telemetry", path)
        for path in experiment.glob("steps/rank_*.jsonl"):
            validate_lines("steps", path)
