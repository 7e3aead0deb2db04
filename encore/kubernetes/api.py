"""A cluster through its API, by the official client, which is an extra and loaded here alone."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from encore import paths
from encore.errors import EncoreError
from encore.kubernetes.manifests import API, INDEX, NODE, Manifest
from encore.kubernetes.settings import Kind, Kubernetes

State = Literal["waiting", "running", "succeeded", "failed", "gone"]
CALL_SECONDS = 30  # a server that does not answer at all is given up after this long
HINTS = {
    401: "log in to the cluster again; see: kubectl auth whoami",
    403: "see what you may do: kubectl auth can-i --list; or another kubernetes.namespace in cluster.toml",
    404: "see the namespaces: kubectl get namespaces; and name one: kubernetes.namespace in cluster.toml",
    409: "end the one that is there: encore cancel RUN",
    422: "see what kubernetes in cluster.toml adds: pod, labels, resources",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How far an experiment's workload is, and why not further."""

    state: State
    reason: str = ""
    pod: str = ""  # its first pod, once it has one: that of rank 0
    made: datetime | None = None


class Connection:
    """A cluster that answers; each call raises EncoreError with what the server refused."""

    def __init__(self, settings: Kubernetes) -> None:
        try:
            from kubernetes import client, config, dynamic
        except ImportError as error:
            raise EncoreError(
                "the Kubernetes client is not installed",
                hint="install Encore's wheel with its extra [kubernetes]; in a checkout: "
                ".venv/bin/pip install --no-deps -r requirements/kubernetes.txt; the manifest alone: --dry-run",
            ) from error
        self._namespace = settings.namespace
        try:
            try:
                config.load_kube_config(os.environ.get("KUBECONFIG") or None, settings.context or None)
            except config.ConfigException:
                # In a pod of the cluster itself
                if "KUBERNETES_SERVICE_HOST" not in os.environ:
                    raise
                config.load_incluster_config()
            self.context = settings.context or _current_context(config)
        except (config.ConfigException, OSError) as error:
            raise EncoreError(
                f"no cluster to talk to: {error}",
                expected="a kubeconfig: KUBECONFIG, or ~/.kube/config",
                hint="see: kubectl config get-contexts; the manifest alone: --dry-run",
            ) from error
        api = client.ApiClient(_configuration(client))
        # By default in a folder and under a name that every user of this machine could write before.
        host = hashlib.sha256(api.configuration.host.encode()).hexdigest()[:16]
        known = paths.cache_folder() / "kubernetes" / f"{host}.json"
        known.parent.mkdir(parents=True, exist_ok=True)
        self._core = client.CoreV1Api(api)
        limited = _limited(client.ApiClient(_configuration(client)))
        self._dynamic = _call(lambda: dynamic.DynamicClient(limited, cache_file=str(known)))

    def serves(self, kind: Kind) -> bool:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            _call(lambda: self._resource(*API[kind]))
        except ResourceNotFoundError:
            return False
        return True

    def create(self, objects: Sequence[Manifest]) -> None:
        """Make an experiment's objects, the workload last; those that it needs belong to it and go with it."""
        workload, *others = objects
        made: list[Manifest] = []
        try:
            for each in others:
                self._do("create", each, body=each)
                made.append(each)
            found = self._do("create", workload, body=workload)
        except EncoreError:
            for each in made:
                with contextlib.suppress(EncoreError):
                    self._do("delete", each, name=each["metadata"]["name"])
            raise
        owner = {key: workload[key] for key in ("apiVersion", "kind")}
        # Blocking: once the workload is gone, so is what went with it, and a resumed run can use its name.
        owner |= {"name": found.metadata.name, "uid": found.metadata.uid, "blockOwnerDeletion": True}
        for each in made:
            body = {"metadata": {"name": each["metadata"]["name"], "ownerReferences": [owner]}}
            self._do("patch", each, body=body, content_type="application/merge-patch+json")

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete a workload and all that goes with it; False if it is not there."""
        api, what = API[kind]
        body = {"propagationPolicy": "Foreground"}
        return self._do("delete", {"apiVersion": api, "kind": what}, name=name, body=body) is not None

    def look(self, kind: Kind, name: str, marks: str) -> Workload:
        """Return how far a workload is; ``marks`` selects its pods."""
        api, what = API[kind]
        found = self._do("get", {"apiVersion": api, "kind": what}, name=name)
        if found is None:
            return Workload(state="gone", reason="it is no longer in the cluster")
        content = found.to_dict()
        made = datetime.fromisoformat(content["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        pods = self._do("get", {"apiVersion": "v1", "kind": "Pod"}, label_selector=marks)
        state, reason, pod = judged(content, pods.to_dict()["items"])
        return Workload(state=state, reason=reason, pod=pod, made=made)

    def log(self, pod: str) -> Iterator[str]:
        """Yield the lines of a pod's ranks, until its container ends or the connection is cut."""
        from urllib3.exceptions import HTTPError

        stream = _call(
            lambda: self._core.read_namespaced_pod_log(
                pod, self._namespace, container=NODE, follow=True, _preload_content=False
            )
        )
        rest = b""
        with contextlib.suppress(HTTPError), contextlib.closing(stream):
            for part in stream.stream():
                *lines, rest = (rest + part).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        if rest:
            yield rest.decode(errors="replace")

    def _resource(self, api: str, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=api, kind=kind)

    def _do(self, verb: str, of: Manifest, **arguments: Any) -> Any:
        # None where a get or delete finds nothing
        arguments = {"namespace": self._namespace, **arguments}

        def call() -> Any:
            return getattr(self._resource(of["apiVersion"], of["kind"]), verb)(**arguments)

        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            return _call(call, missing=verb in ("get", "delete"))
        except ResourceNotFoundError as error:
            raise EncoreError(
                f"the cluster has no {of['kind']} ({of['apiVersion']})",
                expected="the cluster that the run was sent to, with what serves it",
                hint="see: kubectl config current-context; kubectl api-resources",
            ) from error


def _configuration(client: Any) -> Any:
    # The connection pool reads it when it is made: three retries of a server that is silent would take two minutes.
    found = client.Configuration.get_default_copy()
    found.retries = 1
    return found


def _limited(api: Any) -> Any:
    # What is discovered before a call is asked for without a limit
    call = api.call_api

    def limited(*request: Any, _request_timeout: Any = None) -> Any:
        return call(*request, _request_timeout=_request_timeout or CALL_SECONDS)

    api.call_api = limited
    return api


def _current_context(config: Any) -> str:
    # Empty in a pod of the cluster, which has no kubeconfig
    with contextlib.suppress(config.ConfigException, OSError, TypeError, KeyError):
        _, current = config.list_kube_config_contexts(os.environ.get("KUBECONFIG") or None)
        return str(current["name"])
    return ""


def _call(call: Callable[[], Any], missing: bool = False) -> Any:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return call()
    except ApiException as error:
        if missing and error.status == 404:
            return None
        raise EncoreError(f"the cluster refused: {_message(error)}", hint=HINTS.get(error.status, "")) from error
    except HTTPError as error:
        text = str(getattr(error, "reason", None) or error)
        raise EncoreError(f"the cluster does not answer: {text}", hint="is it up? kubectl cluster-info") from error


def _message(error: Any) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}"


def judged(workload: Manifest, pods: Sequence[Manifest]) -> tuple[State, str, str]:
    """Return state, reason and first pod of a workload, by its conditions and its pods, as the API shows them."""
    ends = {"Complete": "succeeded", "Completed": "succeeded", "Failed": "failed"}
    first = sorted(
        (each for each in pods if each["metadata"].get("labels", {}).get(INDEX, "0") == "0"),
        key=lambda each: str(each["metadata"].get("creationTimestamp")),
    )
    name = str(first[-1]["metadata"]["name"]) if first else ""
    for condition in (workload.get("status") or {}).get("conditions") or ():
        if condition["type"] in ends and condition["status"] == "True":
            state: Any = ends[condition["type"]]
            why = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return state, why if state == "failed" else "", name
    if (workload.get("spec") or {}).get("suspend"):
        return "waiting", "suspended: its queue has not admitted it", name
    held = next((why for each in pods if (why := _held(each))), "")
    if first and not held:
        statuses = (first[-1].get("status") or {}).get("containerStatuses") or ()
        if any("running" in (each.get("state") or {}) for each in statuses):
            return "running", "", name
    return "waiting", held or ("its pods start" if pods else "it has no pod yet"), name


def _held(pod: Manifest) -> str:
    # Why a pod does not start; empty where nothing is wrong with it
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    return ""
