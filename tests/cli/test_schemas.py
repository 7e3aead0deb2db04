"""JSON Schemas: files and outputs match them, and a schema stays compatible as long as its version is the same."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from jsonschema import Draft202012Validator

from benchmarks.common.data import manifest
from encore import paths
from encore.cli import schemas
from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.run import run_folder
from tests.cli.test_docs import leaf_commands
from tests.command_line import error_of, output_of
from tests.results.result_logs import write_files

SOURCE = "".join(path.read_text(encoding="utf-8") for path in (paths.ROOT / "encore" / "cli").glob("*.py"))
PRINTED = set(re.findall(r'write_json\(\s*"([\w-]+)"', SOURCE))


@pytest.mark.slow
def test_schemas_are_valid_and_have_a_type_for_each_field() -> None:
    for name in schemas.published():
        Draft202012Validator.check_schema(schemas.schema_of(name))
        assert list(schemas.rows(name)) or name == "precisions", name


def test_every_command_with_json_has_a_schema() -> None:
    leaves, where = leaf_commands(typer.main.get_command(app)), {n: e.where for n, e in schemas.published().items()}
    with_json = {name for name, leaf in leaves.items() if any("--json" in option.opts for option in leaf.params)}
    outputs = {name for name, text in where.items() if text.startswith("encore ")}
    assert ([name for name in with_json if name not in " ".join(where.values())], outputs) == ([], PRINTED)


def test_versions_equal_those_of_the_files() -> None:
    versions = [schemas.published()[name].version for name in ("run", "bundle", "dataset")]
    assert versions == [run_folder.SCHEMA, bundle.SCHEMA, manifest.SCHEMA]


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
    schema = schemas.schema_of("state")
    older = {**schema, "properties": {**schema["properties"], "host": {"type": "string"}}}
    write_files(tmp_path, {"state-1.json": older})
    with pytest.raises(EncoreError, match=r"state-1\.json: host is gone.*\n.*\n.*increase the schema version"):
        schemas.files()
    (tmp_path / "state-1.json").rename(tmp_path / "state-0.json")
    assert tmp_path / "state-1.json" in schemas.files()


def test_schema_command_prints_the_published_file() -> None:
    text = (paths.ROOT / "docs" / "schemas" / "run-result-1.json").read_text(encoding="utf-8")
    printed, listing = (output_of("schema", *words, width=300) for words in (["run-result"], []))
    assert (printed, "run.json" in listing) == (text, True)
    assert "did you mean 'run-result'" in str(error_of("schema", "run-results"))
