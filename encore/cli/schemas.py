"""``encore schema``: JSON Schemas of what Encore writes and prints, made from the types that are written.

`make docs` writes them to docs/schemas, and refuses one that changes what a reader relies on under the same version.
"""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union

import typer
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import NotRequired, TypedDict

from encore import catalogue, configuration, names, paths
from encore.errors import EncoreError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = paths.ROOT / "docs" / "schemas"
Json = dict[str, Any]


@dataclass(frozen=True)
class Published:
    where: str  # What writes it
    kind: str | Callable[[], Any]  # The type that is written, as MODULE:NAME below encore/, or what returns it
    version: int = 1

    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(_named(self.kind) if isinstance(self.kind, str) else self.kind())


# -- the types -----------------------------------------------------------------------------------------


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"encore.{module}"), name)


def _typed_dict(name: str, fields: Mapping[str, Any]) -> Any:
    return TypedDict(name, fields)  # type: ignore[operator]


def _grown(kind: Any, **fields: Any) -> Any:
    # A type with the fields of ``kind`` and these, which its writer adds.
    made = _typed_dict(kind.__name__, {**typing.get_type_hints(kind, include_extras=True), **fields})
    made.__doc__, made.grown_from = kind.__doc__, kind
    return made


def _listed(kind: Any) -> Any:
    return types.GenericAlias(list, kind)


def _one_or_more(*kinds: str) -> Callable[[], Any]:
    def kind() -> Any:
        one: Any = Union[tuple(map(_named, kinds))]  # noqa: UP007
        return one | _listed(one)

    return kind


def _list_of(place: str, **fields: Any) -> Callable[[], Any]:
    return lambda: _listed(_grown(_named(place), **fields) if fields else _named(place))


def _system() -> Any:
    known = dict.fromkeys(_named("results.published.systems:DESCRIPTION_FIELDS"), str)
    return _typed_dict("System", {**known, "other_software_stack": dict[str, str]})


def _record(name: str) -> Callable[[], Any]:
    return lambda: _as_written(getattr(configuration.written_records(), name))


def _metrics() -> Any:
    kinds = typing.get_args(configuration.written_records().Record)
    return Union[tuple(_as_written(each, time=float) for each in kinds)]  # noqa: UP007


def _as_written(record: Any, **fields: Any) -> Any:
    # As ``plain`` of benchmarks/common/records.py writes it: what is empty by default may be missing.
    hints, empty = typing.get_type_hints(record), [each.name for each in dataclasses.fields(record) if _is_empty(each)]
    made = _grown(record, **{name: NotRequired[hints[name]] for name in empty}, **fields)
    made.__pydantic_config__ = getattr(record, "__pydantic_config__", {})
    return made


def _is_empty(field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return not field.default_factory()
    return field.default is not dataclasses.MISSING and not field.default


def _comparison() -> Any:
    tested = _grown(_named("results.compare.noise:Tested"), verdict=str)
    noise = _listed(_grown(_named("results.compare.noise:Noise"), level=float, runs=_listed(tested)))
    return _grown(_named("cli.results:Explained"), noise=noise) | _grown(_named("cli.results:Compared"), noise=noise)


def _status() -> Any:
    row = _grown(_named("run.status:Row"), job=str | None)
    return _grown(_named("cli.jobs:Status"), runs=_listed(row))


def _images() -> Any:
    release = _grown(_named("containers.images:Release"), reference=str, digest=str | None, here=str)
    submitted = _listed(_named("containers.images:Submitted"))
    return _typed_dict("Images", {"releases": _listed(release), "submitted": submitted})


def _sharing() -> Any:
    most = _grown(_named("lab.scaling.scheduling:SteadyState"), rounds_one_after_the_other=float)
    return _grown(_named("cli.plan:Shared"), most_runs=most)


def _config(choice: catalogue.Choice) -> Callable[[], Any]:
    return lambda: configuration.config_class(choice.folder)


@cache
def published() -> dict[str, Published]:
    """Return every schema by its name: files first, then what commands print."""
    configs = {
        f"config-{name}": Published(f"config.json of {name}", _config(choice), choice.implementation.config_schema)
        for name, choice in catalogue.choices().items()
    }
    return {
        "run": Published("run.json", "run.run_metadata:RunMetadata", 3),
        "system": Published("system.json", _system),
        "state": Published("state.json", "run.run_folder:ExperimentState"),
        "metrics": Published("a line of metrics.jsonl", _metrics),
        "steps": Published("a line of steps/rank_N.jsonl", _record("StepWindow")),
        "telemetry": Published("a line of telemetry.jsonl", "machine.telemetry:Sample"),
        "dataset": Published("dataset.json of a data set", _record("DataSet")),
        "images-lock": Published("containers/images.lock", "containers.images:Lock"),
        "bundle": Published("bundle.json of a bundle", "lab.submissions.bundle:Manifest"),
        "run-gate": Published("gate.json of a run with --gate", "machine.node_checks:Gate"),
        "gate": Published("gate/NODE.json in the cache of encore doctor --nodes", "machine.node_checks:KeptVerdict"),
        **configs,
        "release": Published("encore --version", "release:Release"),
        "run-result": Published("encore run, and what --notify reports", "cli.run:RunResult"),
        "run-plan": Published("encore run --dry-run", "cli.run:RunPlan"),
        "submission": Published("encore submit", "cli.submit:Submitted"),
        "manifests": Published("encore submit --kubernetes --dry-run", "cli.submit:Manifests"),
        "workloads": Published("encore submit --kubernetes", "cli.submit:SentWorkloads"),
        "status": Published("encore status", _status),
        "benchmarks": Published("encore list", _list_of("catalogue:Benchmark", name=str, framework=str)),
        "systems": Published("encore list BENCHMARK", _list_of("catalogue:System")),
        "configuration": Published("encore show", "cli.show:ShownConfiguration"),
        "download": Published("encore data get", "cli.data:PlannedDownload"),
        "data": Published("encore data verify", _one_or_more("cli.data:VerifiedData")),
        "doctor": Published("encore doctor", "cli.doctor:Machine"),
        "doctor-nodes": Published("encore doctor --nodes", "cli.doctor:NodeVerdicts"),
        "selftest": Published("encore selftest", "cli.selftest:Tested"),
        "bench": Published("encore bench", "cli.bench:Benched"),
        "precisions": Published("encore bench --profile", lambda: dict[str, list[str]]),
        "images": Published("encore images list", _images),
        "score": Published("encore score", _one_or_more("cli.results:ScoredSet")),
        "check": Published("encore check", _one_or_more("results.findings:ReportJson", "cli.results:CheckedSet")),
        "audit": Published("encore audit", _one_or_more("results.audit.audit:AuditJson")),
        "published": Published("encore published", _list_of("results.published.published:PublishedResult", name=str)),
        "comparison": Published("encore compare", _comparison),
        "tables": Published(
            "encore report, encore published --table, encore list --studies, and studies",
            _list_of("cli.layout:TableJson"),
        ),
        "report": Published("encore report -o", "results.report.report:ReportedJson"),
        "detections": Published("encore report --detections", _list_of("cli.report:ShownImage")),
        "archive": Published("encore archive", _list_of("lab.submissions.archive:PackageJson")),
        "merge": Published("encore archive --merge", "lab.submissions.merge:Merged"),
        "bundled": Published("encore archive --bundle", "cli.report:Bundled"),
        "verification": Published("encore verify", "lab.submissions.bundle:VerifiedJson"),
        "sweep": Published("encore sweep", "cli.sweep:Swept"),
        "sweep-plan": Published("encore sweep --dry-run", "cli.sweep:SweepPlan"),
        "sharing": Published("encore plan", _sharing),
        "study-plan": Published("encore study run --dry-run", "cli.study:StudyPlan"),
        "nodes-plan": Published("encore study run multi-node --dry-run", _list_of("cli.study:NodesPoint")),
        "study-report": Published("encore study run, encore study report STUDY", "cli.study:StudyReport"),
        "study-machine": Published("encore study machine", "lab.studies.topology:MachineJson"),
        "page": Published("encore study report of servers, encore bench --roofline", "cli.study:Page"),
        "reproduction": Published("encore reproduce", _reproduction),
        "export": Published("encore export", _exported),
        "serve-plan": Published("encore serve --dry-run", "cli.serve:ServePlan"),
        "served": Published("encore serve --check, --evaluate or --bench", "cli.serve:Served"),
    }


def _reproduction() -> Any:
    return _listed(_named("cli.reproduce:ReproductionJson") | _named("cli.reproduce:NotUnderstood"))


def _exported() -> Any:
    return _named("cli.export:ExportedModel") | _named("cli.export:ExportedParts")


# -- the schemas ---------------------------------------------------------------------------------------


class _Generator(GenerateJsonSchema):
    """Describes each field by the comment that its class has next to it, and requires what is always written."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        if field["type"] == "typed-dict-field":
            return bool(field.get("required", total))
        return True

    def typed_dict_schema(self, schema: Any) -> Json:
        return _described(super().typed_dict_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> Json:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> Json:
        return _described(super().model_schema(schema), schema["cls"])


def _described(found: Json, kind: Any) -> Json:
    comments = meanings(kind)
    for name, field in found.get("properties", {}).items():
        field.pop("title", None)
        field.pop("default", None)
        if name in comments:
            # What is next to a reference would be lost in older dialects, and is not in this one.
            field["description"] = comments[name]
    return found


_FIELD = re.compile(r" {4}(\w+): [^#]*?(?:  # (.*))?")


@cache
def meanings(kind: Any) -> dict[str, str]:
    """Return the comment behind each field of a class and its bases, or the lines of comment above it."""
    kind = getattr(kind, "grown_from", kind)
    found: dict[str, str] = {}
    bases = [each for each in (getattr(kind, "__orig_bases__", ()) or kind.__mro__[1:]) if isinstance(each, type)]
    for base in bases:
        if base.__module__.partition(".")[0] in ("encore", "benchmarks") or base.__module__.startswith("_config_of_"):
            found |= meanings(base)
    above: list[str] = []
    try:
        lines = inspect.getsource(kind).splitlines()
    except (OSError, TypeError):
        return found  # a type without a class of its own
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field:
            text = field[2] or " ".join(above)
            found |= {field[1]: re.sub(r"\bNone\b", "null", text.replace("``", "`"))} if text else {}
        above = [*above, line.strip("# ")] if line.startswith("    #") else []
    return found


@cache
def schema_of(name: str) -> Json:
    """Return the JSON Schema of that name."""
    known = published()
    if name not in known:
        raise names.unknown("schema", name, known)
    entry = known[name]
    made = entry.adapter().json_schema(mode="serialization", schema_generator=_Generator)
    made.pop("title", None)
    return {"$schema": DIALECT, "$id": f"urn:encore:{name}:{entry.version}", "title": entry.where, **made}


def as_text(name: str) -> str:
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def file_of(name: str) -> Path:
    return FOLDER / f"{name}-{published()[name].version}.json"


def files() -> dict[Path, str]:
    """Return the files of docs/schemas with their text.

    Raises:
        EncoreError: a reader of the file that is there may fail with what is written now.
    """
    for name in published():
        file = file_of(name)
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for change in breaks(old, schema_of(name), (old, schema_of(name))) if old else ():
            raise EncoreError(
                f"docs/schemas/{file.name}: {change}",
                expected="what readers of this version rely on",
                hint="take the change back, or raise the schema's version: in encore/cli/schemas.py, of a config.json "
                "in benchmark.toml (config_schema)",
            )
    return {file_of(name): as_text(name) for name in published()}


# -- what a reader relies on -----------------------------------------------------------------------------


def breaks(old: Json, new: Json, roots: tuple[Json, Json], place: str = "") -> Iterator[str]:
    """Yield what of ``new`` a reader of ``old`` does not expect: a field that is gone, or of another type.

    New fields, new alternatives of a union and new words of an enumeration are expected.
    """
    olds, news = (dict(_alternatives(each, root)) for each, root in zip((old, new), roots, strict=True))
    if "any" in olds:
        return
    gone = {kind.partition(":")[0] for kind in news} - {kind.partition(":")[0] for kind in olds}
    if gone and not (gone == {"integer"} and "number" in olds):
        yield f"{place or 'it'} may be {' or '.join(sorted(gone))} now"
    objects = [[kind for kind in each if kind.startswith("object:")] for each in (olds, news)]
    pairs = [(kind, kind) for kind in olds if kind in news]
    if [len(each) for each in objects] == [1, 1]:  # whatever they are called
        pairs = [each for each in pairs if each[0] not in objects[0]] + [(objects[0][0], objects[1][0])]
    for before, after in ((olds[one], news[other]) for one, other in pairs):
        for name, field in before.get("properties", {}).items():
            where = f"{place}.{name}".lstrip(".")
            if name not in after.get("properties", {}):
                yield f"{where} is gone"
                continue
            if name in before.get("required", ()) and name not in after.get("required", ()):
                yield f"{where} may be missing now"
            yield from breaks(field, after["properties"][name], roots, where)
        for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(before.get(key), dict):
                yield from breaks(before[key], after.get(key) or {}, roots, f"{place}{mark}")


def _alternatives(schema: Json, root: Json) -> Iterator[tuple[str, Json]]:
    # Each type that a value may have, by its name; objects by their titles, too.
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema or "oneOf" in schema:
        for each in schema.get("anyOf") or schema["oneOf"]:
            yield from _alternatives(each, root)
    elif schema.get("type") == "object":
        yield f"object:{schema.get('title', '')}", schema
    else:
        yield str(schema.get("type", "any")), schema


# -- a table of fields -----------------------------------------------------------------------------------


def rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield each field of a schema with its type and what it is, those inside of others after them.

    Where there are several objects, a row without a field is the name of the next.
    """
    root = schema_of(name)
    yield from _rows(root, root, "", ())


def _rows(schema: Json, root: Json, place: str, inside: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    known = list(_alternatives(schema, root))
    several = sum(kind.startswith("object:") for kind, _ in known) > 1
    for kind, found in known:
        if several and kind.startswith("object:"):
            yield "", "", f"*{found['title']}*: {found.get('description', '')}"
        if kind == "array":
            # Where one is written without a list, its fields are not repeated.
            if not {each for each, _ in _alternatives(found.get("items") or {}, root)} <= {each for each, _ in known}:
                yield from _rows(found.get("items") or {}, root, f"{place}[]", inside)
        elif kind.startswith("object:"):
            if isinstance(found.get("additionalProperties"), dict):
                yield from _rows(found["additionalProperties"], root, f"{place}.*" if place else "*", inside)
            for field, each in found.get("properties", {}).items() if kind not in inside else ():
                where = f"{place}.{field}".lstrip(".")
                optional = "" if field in found.get("required", ()) else "may be missing; "
                yield where, type_text(each, root), optional + each.get("description", "")
                yield from _rows(each, root, where, (*inside, kind))


def type_text(schema: Json, root: Json) -> str:
    found = []
    for kind, each in _alternatives(schema, root):
        if "const" in each or "enum" in each:
            found += [json.dumps(word) for word in each.get("enum") or [each["const"]]]
        elif kind == "array":
            inner = type_text(each["items"], root) if each.get("items") else ""
            found.append(f"list of {inner}" if inner and "any" not in inner else "list")
        else:
            found.append(kind.partition(":")[0])
    return " or ".join(dict.fromkeys(found))


# -- the command -----------------------------------------------------------------------------------------


def schema(
    name: Annotated[str | None, typer.Argument(help="Such as run or run-result; default: list them.")] = None,
) -> None:
    """Print the JSON Schema of a file that Encore writes, or of what a command prints with --json.

    Examples:

      encore schema                    their names, versions and what each describes

      encore schema run                that of run.json

      encore schema config-resnet      that of config.json of a benchmark
    """
    if name is not None:
        sys.stdout.write(as_text(name))
        return
    from encore.cli.layout import console, show

    listed = ((each, entry.version, entry.where) for each, entry in published().items())
    show(console(), "schemas", ("name", "version", "describes"), listed, numbers=("version",))
