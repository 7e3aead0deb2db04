"""The check of an exported model, made of the same model in Triton Inference Server: `encore serve --evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np

from benchmarks.common.data.problem import FAILED, Problem
from benchmarks.common.export.export import WHOLE, Arrays, Infer, Parts, Subject, Tools, check, figures, joint
from benchmarks.common.serving import client
from benchmarks.common.serving.client import RefusedError, Server

READY_SECONDS = 10.0


def asking(server: Server, subject: Subject) -> Infer:
    def infer(*inputs: np.ndarray) -> Arrays:
        named = {each.name: np.ascontiguousarray(array) for each, array in zip(subject.inputs, inputs)}
        found = client.predict(server, named)
        return tuple(found[each.name] for each in subject.outputs)

    return infer


def check_served(parts: Parts, tools: Tools, url: str, exported: Path) -> Dict[str, Any]:
    """Pass the evaluation set through the server, over HTTP; return what the check found.

    Raises:
        Problem: the server does not answer, refuses a request, or its outputs differ by more than the tolerance.
    """
    try:
        served = {}
        for name, subject in parts.subjects.items():
            server = Server(url, "http", client.read_passport(exported / name))
            server.wait(READY_SECONDS)
            served[name] = asking(server, subject)
        checked, quality = check(parts, served, tools)
    except RefusedError as error:
        raise Problem(str(error), "a server with this model", "see the server's log", FAILED) from None
    found = {name: figures(subject, checked[name]) for name, subject in parts.subjects.items()}
    together = joint(list(found.values()), quality)
    return together if list(found) == [WHOLE] else {"parts": found, **together}
