"""The names of published data sets, which a data set has only with the counts and checksums that are known of them.

``published_sets.json`` has what a manifest must say, by a dotted path into it; the host side reads the same file. A
name without any count in it cannot be earned.
"""

import json
from pathlib import Path
from typing import Any, Dict, Mapping

OWN = "own data"  # name of a data set that has not earned its own


def known() -> Dict[str, Any]:
    return json.loads(Path(__file__).with_name("published_sets.json").read_text(encoding="utf-8"))


def shortfall(manifest: Mapping[str, Any]) -> str:
    """Say why a data set is not the published one whose name it has; empty where it is, or has a name of its own."""
    sets = known()
    if manifest["name"] not in sets:
        return ""
    wanted = sets[manifest["name"]]
    if not wanted["exactly"]:
        return "no count of it is published"
    differing = [
        f"{path} {found} for {number:,}{more}"
        for kind, more in (("exactly", ""), ("at_least", " or more"))
        for path, number in wanted.get(kind, {}).items()
        for found in [_value(manifest, path)]
        if not isinstance(found, int) or (found < number if more else found != number)
    ]
    for path, digest in wanted.get("checksums", {}).items():
        differing += [f"{path} {_value(manifest, path)} for {digest}"] * (_value(manifest, path) != digest)
    return ", ".join(differing)


def _value(manifest: Mapping[str, Any], path: str) -> Any:
    found: Any = manifest
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return len(found) if isinstance(found, (list, tuple)) else found
