"""Kubernetes client. The official Python client is an optional dependency, imported only in this module."""

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
    401: "log in to the cluster; see: kubectl auth whoami",
    403: "list your permissions: kubectl auth can-i --list; or change kubernetes.namespace in cluster.toml",
    404: "see the namespaces: kubectl get namespaces; and name one: kubernetes.namespace in cluster.toml",
    409: "delete the existing one: encore cancel RUN",
    422: "check pod, labels and resources of kubernetes in cluster.toml",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How far an experiment's workload is, and why not further."""

    state: State
    reason: str = ""
    pod: str = ""  # Pod of rank 0; empty if not created yet
    created: datetime | None = None


class Connection:
    """Connection to a cluster. All methods raise EncoreError with the message of the server."""

    def __init__(self, settings: Kubernetes) -> None:
        try:
            from kubernetes import client, config, dynamic
        except ImportError as error:
            raise EncoreError(
                "the Kubernetes client is not installed",
                hint="install Encore's wheel with the extra [kubernetes]; in a checkout: "
                ".venv/bin/pip install --no-deps -r requirements/kubernetes.txt; to print the manifest only: --dry-run",
            ) from error
        self._namespace = settings.namespace
        try:
            try:
                config.load_kube_config(os.environ.get("KUBECONFIG") or None, settings.context or None)
            except config.ConfigException:
                # Inside a pod of the cluster
                if "KUBERNETES_SERVICE_HOST" not in os.environ:
                    raise
                config.load_incluster_config()
            self.context = settings.context or _current_context(config)
        except (config.ConfigException, OSError) as error:
            raise EncoreError(
                f"no cluster configured: {error}",
                expected="a kubeconfig: KUBECONFIG, or ~/.kube/config",
                hint="see: kubectl config get-contexts; to print the manifest only: --dry-run",
            ) from error
        api = client.ApiClient(_configuration(client))
        # By default in a folder and under a name that every user of this machine could write before.
        host = hashlib.sha256(api.configuration.host.encode()).hexdigest()[:16]
        cache = paths.cache_folder() / "kubernetes" / f"{host}.json"
        cache.parent.mkdir(parents=True, exist_ok=True)
        self._core = client.CoreV1Api(api)
        limited = _with_timeout(client.ApiClient(_configuration(client)))
        self._dynamic = _call(lambda: dynamic.DynamicClient(limited, cache_file=str(cache)))

    def serves(self, kind: Kind) -> bool:
        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            _call(lambda: self._resource(*API[kind]))
        except ResourceNotFoundError:
            return False
        return True

    def create(self, objects: Sequence[Manifest]) -> None:
        """Create an experiment's objects, the workload last. It owns the others, so they are deleted with it."""
        workload, *dependencies = objects
        created: list[Manifest] = []
        try:
            for manifest in dependencies:
                self._do("create", manifest, body=manifest)
                created.append(manifest)
            response = self._do("create", workload, body=workload)
        except EncoreError:
            for manifest in created:
                with contextlib.suppress(EncoreError):
                    self._do("delete", manifest, name=manifest["metadata"]["name"])
            raise
        owner = {key: workload[key] for key in ("apiVersion", "kind")}
        # Blocking: after the workload is deleted, the dependencies are gone, too, and a resumed run can reuse the name.
        owner |= {"name": response.metadata.name, "uid": response.metadata.uid, "blockOwnerDeletion": True}
        for manifest in created:
            body = {"metadata": {"name": manifest["metadata"]["name"], "ownerReferences": [owner]}}
            self._do("patch", manifest, body=body, content_type="application/merge-patch+json")

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete a workload and all that goes with it; False if it is not there."""
        api, object_kind = API[kind]
        body = {"propagationPolicy": "Foreground"}
        return self._do("delete", {"apiVersion": api, "kind": object_kind}, name=name, body=body) is not None

    def look(self, kind: Kind, name: str, selector: str) -> Workload:
        """Return the workload's state; ``selector`` is the label selector of the pods."""
        api, object_kind = API[kind]
        response = self._do("get", {"apiVersion": api, "kind": object_kind}, name=name)
        if response is None:
            return Workload(state="gone", reason="it was deleted from the cluster")
        content = response.to_dict()
        created = datetime.fromisoformat(content["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        pods = self._do("get", {"apiVersion": "v1", "kind": "Pod"}, label_selector=selector)
        state, reason, pod = workload_state(content, pods.to_dict()["items"])
        return Workload(state=state, reason=reason, pod=pod, created=created)

    def log(self, pod: str) -> Iterator[str]:
        """Yield the pod's log lines while the container runs and the connection is open."""
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
        # None if the object to get or delete does not exist
        arguments = {"namespace": self._namespace, **arguments}

        def call() -> Any:
            return getattr(self._resource(of["apiVersion"], of["kind"]), verb)(**arguments)

        from kubernetes.dynamic.exceptions import ResourceNotFoundError

        try:
            return _call(call, missing=verb in ("get", "delete"))
        except ResourceNotFoundError as error:
            raise EncoreError(
                f"the cluster does not serve {of['kind']} ({of['apiVersion']})",
                expected="the cluster of the submission, with the controller of this kind",
                hint="see: kubectl config current-context; kubectl api-resources",
            ) from error


def _configuration(client: Any) -> Any:
    # The connection pool reads it on creation. Three retries with an unresponsive server would take two minutes.
    configuration = client.Configuration.get_default_copy()
    configuration.retries = 1
    return configuration


def _with_timeout(api: Any) -> Any:
    # API discovery does not set a timeout.
    call = api.call_api

    def limited(*request: Any, _request_timeout: Any = None) -> Any:
        return call(*request, _request_timeout=_request_timeout or CALL_SECONDS)

    api.call_api = limited
    return api


def _current_context(config: Any) -> str:
    # Empty inside a pod of the cluster, without a kubeconfig
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
        raise EncoreError(
            f"the cluster rejected the request: {_message(error)}", hint=HINTS.get(error.status, "")
        ) from error
    except HTTPError as error:
        text = str(getattr(error, "reason", None) or error)
        raise EncoreError(f"the cluster does not answer: {text}", hint="is it up? kubectl cluster-info") from error


def _message(error: Any) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}"


def workload_state(workload: Manifest, pods: Sequence[Manifest]) -> tuple[State, str, str]:
    """Return state, reason and first pod of the workload, from the conditions and pods in the API's JSON."""
    ends = {"Complete": "succeeded", "Completed": "succeeded", "Failed": "failed"}
    first = sorted(
        (pod for pod in pods if pod["metadata"].get("labels", {}).get(INDEX, "0") == "0"),
        key=lambda pod: str(pod["metadata"].get("creationTimestamp")),
    )
    name = str(first[-1]["metadata"]["name"]) if first else ""
    for condition in (workload.get("status") or {}).get("conditions") or ():
        if condition["type"] in ends and condition["status"] == "True":
            state: Any = ends[condition["type"]]
            reason = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return state, reason if state == "failed" else "", name
    if (workload.get("spec") or {}).get("suspend"):
        return "waiting", "suspended: not admitted by the queue", name
    blocked = next((reason for pod in pods if (reason := _blocked_reason(pod))), "")
    if first and not blocked:
        statuses = (first[-1].get("status") or {}).get("containerStatuses") or ()
        if any("running" in (status.get("state") or {}) for status in statuses):
            return "running", "", name
    return "waiting", blocked or ("pods are starting" if pods else "no pod created yet"), name


def _blocked_reason(pod: Manifest) -> str:
    # Reason why a pod does not start; empty if it can
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "not scheduled")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    return ""
