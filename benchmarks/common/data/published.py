"""Published data sets: a name is valid only with the published counts and checksums.

``published_sets.json`` has the expected values by dotted path into the manifest; the host reads the same file. A
name without a published count is never valid.
"""

import json
from pathlib import Path
from typing import Any, Dict, Mapping

from benchmarks.common.data.problem import Problem

OWN = "own data"  # name for an unverified data set


def load() -> Dict[str, Any]:
    return json.loads(Path(__file__).with_name("published_sets.json").read_text(encoding="utf-8"))


def shortfall(manifest: Mapping[str, Any]) -> str:
    """Return why a manifest does not match the published data set with its name; empty if it matches or none exists."""
    sets = load()
    if manifest["name"] not in sets:
        return ""
    published = sets[manifest["name"]]
    if not published["exactly"]:
        return "no count of it is published"
    differing = [
        f"{path} {actual:,} for {number:,}{suffix}"
        if isinstance(actual, int)
        else f"{path} {actual} for {number:,}{suffix}"
        for kind, suffix in (("exactly", ""), ("at_least", " or more"))
        for path, number in published.get(kind, {}).items()
        for actual in [_value(manifest, path)]
        if not isinstance(actual, int) or (actual < number if suffix else actual != number)
    ]
    for path, digest in published.get("checksums", {}).items():
        differing += [f"{path} {_value(manifest, path)} for {digest}"] * (_value(manifest, path) != digest)
    return ", ".join(differing)


def refuse(manifest: Mapping[str, Any]) -> None:
    """Raise Problem where a manifest, or the fields known so far, does not match the published set with its name."""
    text = shortfall(manifest)
    if text:
        hint = "complete the source, or give the data set another name with --name"
        raise Problem(f"{manifest['name']} with {text}", "the published data set", hint)


def _value(manifest: Mapping[str, Any], path: str) -> Any:
    value: Any = manifest
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return len(value) if isinstance(value, (list, tuple)) else value
