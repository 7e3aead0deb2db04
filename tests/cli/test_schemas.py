"""JSON Schemas: files and outputs match them, and a schema stays compatible as long as its version is the same."""

import copy
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
from jsonschema import Draft202012Validator

from encore import paths
from encore.cli import schemas
from encore.cli.app import app
from encore.containers import images
from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.machine import node_checks
from encore.machine.preflight import Check
from encore.run import run_folder
from tests.cli.test_docs import invoke, leaf_commands
from tests.json_schemas import validate, validate_file

SOURCE = "".join(path.read_text(encoding="utf-8") for path in (paths.ROOT / "encore" / "cli").glob("*.py"))
PRINTED = set(re.findall(r'write_json\(\s*"([\w-]+)"', SOURCE))


@pytest.mark.slow
def test_schemas_are_valid_and_have_a_type_for_each_field() -> None:
    for name in schemas.published():
        Draft202012Validator.check_schema(schemas.schema_of(name))
        assert list(schemas.rows(name)) or name == "precisions", name


def test_every_command_with_json_has_a_schema() -> None:
    entries, commands = schemas.published(), leaf_commands(typer.main.get_command(app))
    with_json = {name for name, leaf in commands.items() if any("--json" in option.opts for option in leaf.params)}
    outputs = {name: entry.where for name, entry in entries.items() if entry.where.startswith("encore ")}
    described = " ".join(entry.where for entry in entries.values())
    assert ([name for name in with_json if name not in described], set(outputs)) == ([], PRINTED)


def test_versions_equal_those_of_the_files() -> None:
    text = (paths.BENCHMARKS / "common" / "data" / "manifest.py").read_text(encoding="utf-8")
    versions = [schemas.published()[name].version for name in ("run", "bundle", "dataset")]
    assert versions == [run_folder.SCHEMA, bundle.SCHEMA, int(re.findall(r"^SCHEMA = (\d+)$", text, re.MULTILINE)[0])]


def test_data_set_matches_its_schema(toy: Callable[[str], Path]) -> None:
    validate_file("dataset", toy("ncf") / "dataset.json")


def test_locks_and_verdicts_match_their_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images.record("registry/image:1", "sha256:0", tmp_path / "images.lock")
    validate_file("images-lock", tmp_path / "images.lock")
    monkeypatch.setattr(node_checks, "folder", lambda: tmp_path)
    node_checks.store([node_checks.Verdict("n1", (Check("WARN", "kernel", "another one", "update it"),))])
    validate_file("gate", tmp_path / "n1.json")


def test_tests_reject_unknown_fields_that_readers_accept() -> None:
    state = {"status": "reached", "reason": "", "started": "", "ended": "", "is_final": False, "job": "", "cluster": ""}
    reader = Draft202012Validator(schemas.schema_of("state"))
    incomplete = {key: value for key, value in state.items() if key != "job"}
    for content, is_readable in ((state, True), ({**state, "more": 1}, True), ({**state, "status": 3}, False)):
        assert reader.is_valid(content) == is_readable
    for content in ({**state, "more": 1}, {**state, "status": 3}, incomplete):
        with pytest.raises(AssertionError):
            validate("state", content)
    validate("state", state)


# -- compatibility of two versions ----------------------------------------------------------------------

OLD: dict[str, Any] = {
    "$defs": {"Run": {"title": "Run", "type": "object", "properties": {"minutes": {"type": "number"}}}},
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "status": {"enum": ["reached"], "type": "string"},
        "runs": {"type": "array", "items": {"$ref": "#/$defs/Run"}},
        "best": {"anyOf": [{"$ref": "#/$defs/Run"}, {"type": "null"}]},
        "speeds": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["name"],
}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("path", "value", "breaks"),
    [
        (("properties", "more"), {"type": "string"}, []),
        (("properties", "status", "enum"), ["reached", "failed"], []),
        (("properties", "speeds", "additionalProperties"), {"type": "integer"}, []),
        (("properties", "best"), NULL, []),
        (("properties", "name"), None, ["name is gone"]),
        (("properties", "name"), {"type": "integer"}, ["name may be integer now"]),
        (("properties", "name"), {"anyOf": [{"type": "string"}, NULL]}, ["name may be null now"]),
        (("properties", "name"), {}, ["name may be any now"]),
        (("required",), [], ["name may be missing now"]),
        (("$defs", "Run", "properties", "minutes"), None, ["runs[].minutes is gone", "best.minutes is gone"]),
        (("properties", "speeds", "additionalProperties"), {"type": "string"}, ["speeds.* may be string now"]),
        (("$defs", "Run"), {"title": "Other", "type": "object"}, ["runs[].minutes is gone", "best.minutes is gone"]),
    ],
)
def test_breaking_changes_are_reported(path: tuple[str, ...], value: Any, breaks: list[str]) -> None:
    new = copy.deepcopy(OLD)
    parent = functools.reduce(dict.__getitem__, path[:-1], new)
    parent.update({path[-1]: value}) if value is not None else parent.pop(path[-1])
    assert list(schemas.breaks(OLD, new, (OLD, new))) == breaks


def test_breaking_change_needs_a_new_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "FOLDER", tmp_path)
    schema = copy.deepcopy(schemas.schema_of("state"))
    schema["properties"]["host"] = {"type": "string"}
    (tmp_path / "state-1.json").write_text(json.dumps(schema), encoding="utf-8")
    with pytest.raises(EncoreError, match=r"state-1\.json: host is gone.*\n.*\n.*increase the schema version"):
        schemas.files()
    (tmp_path / "state-1.json").rename(tmp_path / "state-0.json")
    assert tmp_path / "state-1.json" in schemas.files()


def test_schema_command_prints_the_published_file() -> None:
    text = (paths.ROOT / "docs" / "schemas" / "run-result-1.json").read_text(encoding="utf-8")
    assert invoke(["encore", "schema", "run-result"]) == text and "run.json" in invoke(["encore", "schema"])
    with pytest.raises(EncoreError, match="did you mean 'run-result'"):
        schemas.schema_of("run-results")
