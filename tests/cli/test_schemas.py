"""The schemas of what Encore writes: true of what is written, and the same for readers as long as their version is."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from jsonschema import Draft202012Validator, ValidationError

from encore import catalogue, configuration, paths
from encore.cli import schemas
from encore.cli.app import app
from encore.containers import images
from encore.errors import EncoreError
from encore.lab.submissions import bundle
from encore.machine import verdict
from encore.machine.preflight import Check
from encore.run import run_folder
from tests.cli.test_docs import invoked, leaves
from tests.conftest import Study
from tests.json_schemas import validate, validate_file, validate_run

SOURCE = "".join(path.read_text(encoding="utf-8") for path in (paths.ROOT / "encore" / "cli").glob("*.py"))
PRINTED = set(re.findall(r'write_json\(\s*"([\w-]+)"', SOURCE))


@pytest.mark.slow
def test_schemas_are_valid_and_have_a_type_for_each_field() -> None:
    for name in schemas.published():
        Draft202012Validator.check_schema(schemas.schema_of(name))
        assert list(schemas.rows(name)) or name in ("precisions",), name


def test_every_command_with_json_has_a_schema() -> None:
    known = leaves(typer.main.get_command(app))
    with_json = [name for name, command in known.items() if any("--json" in each.opts for each in command.params)]
    described = " ".join(entry.where for entry in schemas.published().values())
    assert [name for name in with_json if name not in described] == []
    files = {name for name, entry in schemas.published().items() if not entry.where.startswith("encore ")}
    assert set(schemas.published()) - files == PRINTED


def test_versions_are_those_that_the_files_have() -> None:
    known = schemas.published()
    assert (known["run"].version, known["bundle"].version) == (run_folder.SCHEMA, bundle.SCHEMA)
    text = (paths.BENCHMARKS / "common" / "data" / "passport.py").read_text(encoding="utf-8")
    assert f"\nSCHEMA = {known['dataset'].version}\n" in text


@pytest.mark.parametrize("name", catalogue.choices())
def test_every_systems_configuration_is_as_its_schema_has_it(name: str) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        validate(f"config-{name}", json.loads(json.dumps(resolved.plain())))


def test_a_trained_run_is_as_its_schemas_have_it(study: Study, digits: Path) -> None:
    for ranks in (1, 2):
        validate_run(study.of_ranks(ranks).parent)
    validate("sweep", study.printed)
    validate_file("dataset", digits / "dataset.json")


def test_digests_and_verdicts_are_as_their_schemas_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images.record("registry/image:1", "sha256:0", tmp_path / "images.lock")
    validate_file("images-lock", tmp_path / "images.lock")
    monkeypatch.setattr(verdict, "folder", lambda: tmp_path)
    verdict.keep([verdict.Verdict("n1", (Check("WARN", "kernel", "another one", "update it"),))])
    validate_file("gate", tmp_path / "n1.json")


def test_an_unknown_or_missing_field_is_seen() -> None:
    state = {"status": "reached", "reason": "", "started": "", "ended": "", "is_final": False, "job": "", "cluster": ""}
    validate("state", state)
    for wrong in ({**state, "more": 1}, {**state, "status": 3}, {k: v for k, v in state.items() if k != "job"}):
        with pytest.raises(AssertionError):
            validate("state", wrong)
    # A reader is to take what it does not know
    Draft202012Validator(schemas.schema_of("state")).validate({**state, "more": 1})
    with pytest.raises(ValidationError):
        Draft202012Validator(schemas.schema_of("state")).validate({**state, "status": 3})


# -- what a reader relies on -----------------------------------------------------------------------------

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
    ("place", "value", "found"),
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
def test_a_change_that_a_reader_notices_is_found(place: tuple[str, ...], value: Any, found: list[str]) -> None:
    new = copy.deepcopy(OLD)
    inner = new
    for each in place[:-1]:
        inner = inner[each]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    assert list(schemas.breaks(OLD, new, (OLD, new))) == found


def test_such_a_change_is_refused_until_the_version_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "FOLDER", tmp_path)
    before = copy.deepcopy(schemas.schema_of("state"))
    before["properties"]["host"] = {"type": "string"}
    (tmp_path / "state-1.json").write_text(json.dumps(before), encoding="utf-8")
    with pytest.raises(EncoreError, match=r"state-1\.json: host is gone.*\n.*\n.*raise the schema's version"):
        schemas.files()
    (tmp_path / "state-1.json").rename(tmp_path / "state-0.json")
    assert tmp_path / "state-1.json" in schemas.files()


def test_the_command_prints_what_is_published() -> None:
    text = (paths.ROOT / "docs" / "schemas" / "run-result-1.json").read_text(encoding="utf-8")
    assert invoked(["encore", "schema", "run-result"]) == text
    assert "run.json" in invoked(["encore", "schema"])
    with pytest.raises(EncoreError, match="did you mean 'run-result'"):
        schemas.schema_of("run-results")
