"""``encore schema``: JSON Schemas of Encore's files and outputs, generated from the types in the code.

`make docs` writes them to docs/schemas, and rejects incompatible changes without a new version.
"""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Union

import typer
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import NotRequired, TypedDict

from encore import catalogue, configuration, paths
from encore.errors import EncoreError, unknown_name

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = paths.ROOT / "docs" / "schemas"
Json = dict[str, Any]


@dataclass(frozen=True)
class Published:
    where: str  # Command that writes it
    kind: str | Callable[[], Any]  # Type as MODULE:NAME below encore/, or a function that returns it
    version: int = 1

    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(_named(self.kind) if isinstance(self.kind, str) else self.kind())


# -- the types -----------------------------------------------------------------------------------------


def _named(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"encore.{module}"), name)


def _typed_dict(name: str, fields: Mapping[str, Any]) -> Any:
    return TypedDict(name, fields)  # type: ignore[operator]


def _grown(kind: Any, *left_out: str, **fields: Any) -> Any:
    # ``kind`` with additional fields from its writer, and without those that are not written
    hints = typing.get_type_hints(kind, include_extras=True)
    written = {name: hint for name, hint in hints.items() if name not in left_out}
    extended = _typed_dict(kind.__name__, {**written, **fields})
    extended.__doc__, extended.grown_from = kind.__doc__, kind
    return extended


def _listed(kind: Any) -> Any:
    return types.GenericAlias(list, kind)


def _one_or_more(*kinds: str) -> Callable[[], Any]:
    def kind() -> Any:
        union: Any = Union[tuple(map(_named, kinds))]  # noqa: UP007
        return union | _listed(union)

    return kind


def _list_of(reference: str, **fields: Any) -> Callable[[], Any]:
    return lambda: _listed(_grown(_named(reference), **fields) if fields else _named(reference))


def _system() -> Any:
    fields = dict.fromkeys(_named("results.published.systems:DESCRIPTION_FIELDS"), str)
    return _typed_dict("System", {**fields, "other_software_stack": dict[str, str]})


def _record(name: str) -> Callable[[], Any]:
    return lambda: _as_written(getattr(configuration.written_records(), name))


def _metrics() -> Any:
    kinds = typing.get_args(configuration.written_records().Record)
    return Union[tuple(_as_written(record, time=float) for record in kinds)]  # noqa: UP007


def _as_written(record: Any, **fields: Any) -> Any:
    # Same rule as ``plain`` in benchmarks/common/records.py: fields that are empty by default are optional.
    hints, empty = typing.get_type_hints(record), {}
    for field in dataclasses.fields(record):
        make = field.default_factory
        if not (field.default if make is dataclasses.MISSING else make()):
            empty[field.name] = NotRequired[hints[field.name]]
    extended = _grown(record, **empty, **fields)
    extended.__pydantic_config__ = getattr(record, "__pydantic_config__", {})
    return extended


def _comparison() -> Any:
    tested = _grown(_named("results.compare.noise:Tested"), verdict=str)
    noise = _listed(_grown(_named("results.compare.noise:Noise"), level=float, runs=_listed(tested)))
    return _grown(_named("cli.results:Explained"), noise=noise) | _grown(_named("cli.results:Compared"), noise=noise)


def _detections() -> Any:
    optional = {"score": NotRequired[float], "matched": NotRequired[bool], "crowd": NotRequired[bool]}
    shapes = _listed(_grown(_named("results.report.samples_view:Shape"), "runs", has_mask=bool, **optional))
    image = _named("results.report.samples_view:Detected")
    return _listed(_grown(image, "jpeg", "found", detections=shapes, objects=shapes, picture=str | None))


def _download() -> Any:
    file = _grown(
        _named("download:Fetch"), "target", "unpacked_bytes", "hub", "header", file=str, state=str, command=str
    )
    plan = _named("download:Plan")
    return _grown(plan, "directory", "output", "fetches", "words", files=_listed(file), next=list[str])


def _images() -> Any:
    release = _grown(_named("containers.images:Release"), reference=str, digest=str | None, here=str)
    submitted = _listed(_named("containers.images:Submitted"))
    return _typed_dict("Images", {"releases": _listed(release), "submitted": submitted})


def _sharing() -> Any:
    steady_state = _grown(_named("lab.scaling.scheduling:SteadyState"), rounds_one_after_the_other=float)
    return _grown(_named("cli.plan:Shared"), most_runs=steady_state)


@cache
def published() -> dict[str, Published]:
    """Return all schemas by name: files, then command outputs."""
    configs = {
        f"config-{name}": Published(
            f"config.json of {name}",
            partial(configuration.config_class, choice.folder),
            choice.implementation.config_schema,
        )
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
        "run-result": Published("encore run, and --notify", "cli.run:RunResult"),
        "run-plan": Published("encore run --dry-run", "cli.run:RunPlan"),
        "submission": Published("encore submit", "cli.submit:Submitted"),
        "manifests": Published("encore submit --kubernetes --dry-run", "cli.submit:Manifests"),
        "workloads": Published("encore submit --kubernetes", "cli.submit:SentWorkloads"),
        "status": Published(
            "encore status",
            lambda: _grown(_named("cli.jobs:Status"), runs=_list_of("run.status:Row", job=str | None)()),
        ),
        "benchmarks": Published("encore list", _list_of("catalogue:Benchmark", name=str, framework=str)),
        "systems": Published("encore list BENCHMARK", _list_of("catalogue:System")),
        "configuration": Published("encore show", "cli.show:ShownConfiguration"),
        "download": Published("encore data get", _download),
        "data": Published("encore data verify", _one_or_more("cli.data:VerifiedData")),
        "doctor": Published("encore doctor", "cli.doctor:Machine"),
        "doctor-nodes": Published("encore doctor --nodes", "cli.doctor:NodeVerdicts"),
        "selftest": Published("encore selftest", "cli.selftest:Tested"),
        "bench": Published("encore bench", "cli.bench:Benched"),
        "projection": Published("encore bench --project", "lab.scaling.projection:Projected"),
        "precisions": Published("encore bench --profile", lambda: dict[str, list[str]]),
        "images": Published("encore images list", _images),
        "score": Published("encore score", _one_or_more("cli.results:ScoredSet")),
        "check": Published("encore check", _one_or_more("results.findings:ReportJson", "cli.results:CheckedSet")),
        "audit": Published("encore audit", _one_or_more("results.audit.audit:AuditJson")),
        "published": Published("encore published", _list_of("results.published.published:PublishedResult", name=str)),
        "comparison": Published("encore compare", _comparison),
        "tables": Published(
            "encore report, encore published --table, encore list --studies, and studies",
            _list_of("results.table:Table"),
        ),
        "report": Published("encore report -o", "results.report.report:ReportedJson"),
        "detections": Published("encore report --detections", _detections),
        "archive": Published("encore archive", _list_of("lab.submissions.archive:Package")),
        "merge": Published("encore archive --merge", "lab.submissions.merge:Merged"),
        "bundled": Published("encore archive --bundle", "cli.packaging:Bundled"),
        "verification": Published("encore verify", "lab.submissions.bundle:Verified"),
        "sweep": Published("encore sweep", "cli.sweep:Swept"),
        "sweep-plan": Published("encore sweep --dry-run", "cli.sweep:SweepPlan"),
        "sharing": Published("encore plan", _sharing),
        "study-plan": Published("encore study run --dry-run", "cli.study:StudyPlan"),
        "nodes-plan": Published("encore study run multi-node --dry-run", _list_of("cli.study:NodesPoint")),
        "study-report": Published("encore study run, encore study report STUDY", "cli.study:StudyReport"),
        "study-machine": Published("encore study machine", "lab.studies.topology:MachineJson"),
        "page": Published("encore study report of servers, encore bench --roofline", "cli.study:Page"),
        "reproduction": Published(
            "encore reproduce",
            lambda: _listed(_named("cli.reproduce:ReproductionJson") | _named("cli.reproduce:NotUnderstood")),
        ),
        "export": Published(
            "encore export", lambda: _named("cli.export:ExportedModel") | _named("cli.export:ExportedParts")
        ),
        "serve-plan": Published("encore serve --dry-run", "cli.serve:ServePlan"),
        "served": Published("encore serve --check, --evaluate or --bench", "cli.serve:Served"),
    }


# -- the schemas ---------------------------------------------------------------------------------------


class _Generator(GenerateJsonSchema):
    """Takes descriptions from the comments beside fields, and marks fields that are always written as required."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return field["type"] != "typed-dict-field" or bool(field.get("required", total))

    def typed_dict_schema(self, schema: Any) -> Json:
        return _described(super().typed_dict_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> Json:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> Json:
        return _described(super().model_schema(schema), schema["cls"])


def _described(schema: Json, kind: Any) -> Json:
    comments = meanings(kind)
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        field.pop("default", None)
        if name in comments:
            # Older dialects ignore keys beside a reference; this dialect does not.
            field["description"] = comments[name]
    return schema


_FIELD = re.compile(r" {4}(\w+): [^#]*?(?:  # (.*))?")


@cache
def meanings(type_: Hashable) -> dict[str, str]:
    """Return field -> comment after or above the field, for a class and its bases."""
    kind: Any = getattr(type_, "grown_from", type_)
    descriptions: dict[str, str] = {}
    bases = [parent for parent in (getattr(kind, "__orig_bases__", ()) or kind.__mro__[1:]) if isinstance(parent, type)]
    for base in bases:
        if base.__module__.partition(".")[0] in ("encore", "benchmarks") or base.__module__.startswith("_config_of_"):
            descriptions |= meanings(base)
    above: list[str] = []
    try:
        lines = inspect.getsource(kind).splitlines()
    except (OSError, TypeError):
        return descriptions  # types without a class
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field:
            text = field[2] or " ".join(above)
            descriptions |= {field[1]: re.sub(r"\bNone\b", "null", text.replace("``", "`"))} if text else {}
        above = [*above, line.strip("# ")] if line.startswith("    #") else []
    return descriptions


@cache
def schema_of(name: str) -> Json:
    """Return the JSON Schema of that name."""
    entries = published()
    if name not in entries:
        raise unknown_name("schema", name, entries)
    entry = entries[name]
    document = entry.adapter().json_schema(mode="serialization", schema_generator=_Generator)
    document.pop("title", None)
    return {"$schema": DIALECT, "$id": f"urn:encore:{name}:{entry.version}", "title": entry.where, **document}


def as_text(name: str) -> str:
    return json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n"


def file_of(name: str) -> Path:
    return FOLDER / f"{name}-{published()[name].version}.json"


def files() -> dict[Path, str]:
    """Return the contents of the files in docs/schemas.

    Raises:
        EncoreError: incompatible change of an existing schema.
    """
    for name in published():
        file = file_of(name)
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for change in breaks(old, schema_of(name), (old, schema_of(name))) if old else ():
            raise EncoreError(
                f"docs/schemas/{file.name}: {change}",
                expected="compatibility with readers of this version",
                hint="revert the change, or increase the schema version: in encore/cli/schemas.py, or for config.json "
                "in benchmark.toml (config_schema)",
            )
    return {file_of(name): as_text(name) for name in published()}


# -- compatibility ---------------------------------------------------------------------------------------


def breaks(old: Json, new: Json, roots: tuple[Json, Json], path: str = "") -> Iterator[str]:
    """Yield incompatible changes for readers of ``old``: removed fields and different types.

    New fields, union members and enumeration values are compatible.
    """
    olds, news = (dict(_alternatives(schema, root)) for schema, root in zip((old, new), roots, strict=True))
    if "any" in olds:
        return
    gone = {kind.partition(":")[0] for kind in news} - {kind.partition(":")[0] for kind in olds}
    if gone and not (gone == {"integer"} and "number" in olds):
        yield f"{path or 'it'} may be {' or '.join(sorted(gone))} now"
    objects = [[kind for kind in kinds if kind.startswith("object:")] for kinds in (olds, news)]
    pairs = [(kind, kind) for kind in olds if kind in news]
    if [len(kinds) for kinds in objects] == [1, 1]:  # whatever they are called
        pairs = [pair for pair in pairs if pair[0] not in objects[0]] + [(objects[0][0], objects[1][0])]
    for old_schema, new_schema in ((olds[before], news[after]) for before, after in pairs):
        for name, field in old_schema.get("properties", {}).items():
            field_path = f"{path}.{name}".lstrip(".")
            if name not in new_schema.get("properties", {}):
                yield f"{field_path} is gone"
                continue
            if name in old_schema.get("required", ()) and name not in new_schema.get("required", ()):
                yield f"{field_path} may be missing now"
            yield from breaks(field, new_schema["properties"][name], roots, field_path)
        for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(old_schema.get(key), dict):
                yield from breaks(old_schema[key], new_schema.get(key) or {}, roots, f"{path}{mark}")


def _alternatives(schema: Json, root: Json) -> Iterator[tuple[str, Json]]:
    # The value's possible types by name; objects by title, too.
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema or "oneOf" in schema:
        for alternative in schema.get("anyOf") or schema["oneOf"]:
            yield from _alternatives(alternative, root)
    elif schema.get("type") == "object":
        yield f"object:{schema.get('title', '')}", schema
    else:
        yield str(schema.get("type", "any")), schema


# -- a table of fields -----------------------------------------------------------------------------------


def rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and description for a schema's fields, nested fields after their parent.

    For unions of objects, a row without a path starts the next object.
    """
    root = schema_of(name)
    yield from _rows(root, root, "", ())


def _rows(schema: Json, root: Json, path: str, parents: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    alternatives = list(_alternatives(schema, root))
    several = sum(kind.startswith("object:") for kind, _ in alternatives) > 1
    for kind, alternative in alternatives:
        if several and kind.startswith("object:"):
            yield "", "", f"*{alternative['title']}*: {alternative.get('description', '')}"
        if kind == "array":
            # If the same object can also occur without the list, do not repeat its fields.
            items = {item for item, _ in _alternatives(alternative.get("items") or {}, root)}
            if not items <= {other for other, _ in alternatives}:
                yield from _rows(alternative.get("items") or {}, root, f"{path}[]", parents)
        elif kind.startswith("object:"):
            if isinstance(alternative.get("additionalProperties"), dict):
                yield from _rows(alternative["additionalProperties"], root, f"{path}.*" if path else "*", parents)
            for field, field_schema in alternative.get("properties", {}).items() if kind not in parents else ():
                field_path = f"{path}.{field}".lstrip(".")
                optional = "" if field in alternative.get("required", ()) else "may be missing; "
                yield field_path, type_text(field_schema, root), optional + field_schema.get("description", "")
                yield from _rows(field_schema, root, field_path, (*parents, kind))


def type_text(schema: Json, root: Json) -> str:
    type_names = []
    for kind, alternative in _alternatives(schema, root):
        if "const" in alternative or "enum" in alternative:
            type_names += [json.dumps(word) for word in alternative.get("enum") or [alternative["const"]]]
        elif kind == "array":
            inner = type_text(alternative["items"], root) if alternative.get("items") else ""
            type_names.append(f"list of {inner}" if inner and "any" not in inner else "list")
        else:
            type_names.append(kind.partition(":")[0])
    return " or ".join(dict.fromkeys(type_names))


# -- the command -----------------------------------------------------------------------------------------


def schema(
    name: Annotated[str | None, typer.Argument(help="Such as run or run-result. Default: list the names.")] = None,
) -> None:
    """Print the JSON Schema of a file or of a command's --json output.

    Examples:

      encore schema                    list names, versions and descriptions

      encore schema run                run.json

      encore schema config-resnet      config.json of a benchmark
    """
    if name is not None:
        sys.stdout.write(as_text(name))
    else:
        from encore.cli.layout import console, show

        rows = ((schema_name, entry.version, entry.where) for schema_name, entry in published().items())
        show(console(), "schemas", ("name", "version", "describes"), rows, numbers=("version",))
