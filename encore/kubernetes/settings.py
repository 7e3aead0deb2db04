"""``[kubernetes]`` section of cluster.toml."""

import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from encore.catalogue import Strict
from encore.errors import EncoreError

Kind = Literal["job", "jobset"]
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # RFC 1123, as Kubernetes wants names
KINDS = ("auto", *get_args(Kind))


class Volume(Strict):
    """A folder with the same path here and in the pods, from a claim or a hostPath."""

    path: Path
    claim: str = ""  # PersistentVolumeClaim mounted at ``path``; empty: hostPath with this path

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError(f"{str(path)!r} is not an absolute path")
        return path

    @field_validator("claim")
    @classmethod
    def _is_name(cls, claim: str) -> str:
        if claim and not CLAIM.fullmatch(claim):
            raise ValueError(f"{claim!r} is not a claim name: use lower case letters, digits, - and .")
        return claim


class Kubernetes(Strict):
    context: str = ""  # Context of the kubeconfig; empty: the current context
    namespace: str = "default"
    kind: Literal["auto", "job", "jobset"] = "auto"
    volumes: tuple[Volume, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    # Resource limits of a pod, also used as requests: cpu, memory, rdma/... of an adapter
    resources: dict[str, str] = Field(default_factory=dict)
    hang_seconds: float = Field(default=600.0, ge=0)  # Stop the ranks after this time without a step; 0: never
    host_network: bool = False
    host_ipc: bool = False
    user: int | None = Field(default=None, ge=0)  # numbers that the ranks run as; None: the caller's
    group: int | None = Field(default=None, ge=0)
    labels: dict[str, str] = Field(default_factory=dict)  # of the workload, such as Kueue's queue
    annotations: dict[str, str] = Field(default_factory=dict)  # of the pods, such as a second network
    pod: dict[str, Any] = Field(default_factory=dict)  # Merged into the pod spec: nodeSelector, tolerations ...


def volume(text: str) -> Volume:
    """Return the volume of ``--volume /shared=CLAIM``, or ``/shared`` for a folder of the nodes."""
    path, _, claim = text.partition("=")
    try:
        return Volume(path=Path(path), claim=claim)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        expected = "/FOLDER=CLAIM, or /FOLDER for a folder of every node"
        if path.startswith("/"):
            expected = "a claim name of lower case letters, digits, - and ."
        raise EncoreError(f"--volume {text}: {reason}", expected=expected) from error
