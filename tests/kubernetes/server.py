"""A small API server that validates objects against Kubernetes' schemas and runs pods as processes.

It has no kubelet and no scheduler: container arguments are started as a process, with volumes at their host
paths. Pods are never replaced.
"""

import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from encore.kubernetes.manifests import FILES, INDEX
from tests.results.result_logs import write_files

VERSIONS = ("1.34", "1.35", "1.36", "1.37")  # Four latest versions in kubernetes-validate
GROUPS = {
    "v1": {"Pod": "pods", "Service": "services", "ConfigMap": "configmaps", "Secret": "secrets"},
    "batch/v1": {"Job": "jobs"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
}
PATH = re.compile(
    r"/(?:api|apis)/(?P<api>.+)/namespaces/(?P<space>[\w-]+)/(?P<plural>\w+)(?:/(?P<name>[\w.-]+))?(?P<log>/log)?"
)
TIME = "2026-11-26T08:00:00Z"


def valid(content: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(content, version, strict=True)


def write_kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}],
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def discovered(path: str) -> dict[str, Any] | None:
    # What the server says of itself, of its API groups and of their resources
    name = path.removeprefix("/apis/").removeprefix("/api/")
    if name in GROUPS:
        facts = {"singularName": "", "namespaced": True, "verbs": ["create", "delete", "get", "list", "patch"]}
        resources = [{"name": plural, "kind": kind, **facts} for kind, plural in GROUPS[name].items()]
        return {"kind": "APIResourceList", "groupVersion": name, "resources": resources}
    versions = [{"groupVersion": group, "version": group.split("/")[1]} for group in GROUPS if "/" in group]
    groups = [
        {"name": version["groupVersion"].split("/")[0], "versions": [version], "preferredVersion": version}
        for version in versions
    ]
    return {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }.get(path)


class Server(ThreadingHTTPServer):
    """The API server of a test. Pods run at once, or stay pending with the message ``unschedulable``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.unschedulable = folder, ""
        self.environment: dict[str, str] = {}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def pods(self) -> list[dict[str, Any]]:
        return [content for (plural, _), content in self.objects.items() if plural == "pods"]

    def create(self, plural: str, content: dict[str, Any]) -> dict[str, Any]:
        if content["apiVersion"] in ("v1", "batch/v1"):
            valid(content)
        name = content["metadata"]["name"]
        content["metadata"] |= {"uid": f"uid-of-{plural}-{name}", "creationTimestamp": TIME}
        self.objects[plural, name] = content
        if plural == "jobs":
            content["status"] = {}
            pods = [self._create_pod(content, number) for number in range(content["spec"]["completions"])]
            if not self.unschedulable:
                threading.Thread(target=self._finish, args=(content, pods), daemon=True).start()
        return content

    def delete(self, plural: str, name: str) -> dict[str, Any]:
        owner = self.objects.pop((plural, name))["metadata"]["uid"]
        for key, content in [*self.objects.items()]:
            if owner in {reference["uid"] for reference in content["metadata"].get("ownerReferences", ())}:
                del self.objects[key]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _finish(self, job: dict[str, Any], pods: list[str]) -> None:
        codes = [self.processes[pod].wait() for pod in pods]
        end = {"type": "Failed", "reason": "PodFailurePolicy"} if any(codes) else {"type": "Complete"}
        job["status"] = {"conditions": [{**end, "status": "True", "message": f"exit codes {codes}"}]}

    def _create_pod(self, job: dict[str, Any], number: int) -> str:
        name, template = f"{job['metadata']['name']}-{number}", job["spec"]["template"]
        owner = {key: job["metadata"][key] for key in ("uid", "name")} | {"kind": "Job", "apiVersion": "batch/v1"}
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {
                "name": name, "labels": {**template["metadata"]["labels"], INDEX: str(number)},
                "ownerReferences": [owner], "creationTimestamp": TIME,
            },
        }  # fmt: skip
        if self.unschedulable:
            reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"] = {"phase": "Pending", "conditions": [{**reason, "message": self.unschedulable}]}
        else:
            self._start(job["metadata"]["name"], pod, number)
        valid(pod)
        self.objects["pods", name] = pod
        return name

    def _start(self, job: str, pod: dict[str, Any], number: int) -> None:
        name, spec = pod["metadata"]["name"], pod["spec"]
        files = write_files(self.folder / f"files-{name}", self.objects["configmaps", job]["data"])

        def start(container: dict[str, Any]) -> subprocess.Popen[bytes]:
            # Host names of the cluster cannot be resolved.
            words = [str(files) if word == FILES else word for word in container["args"]]
            command = [re.sub(r"--master-addr=.*", "--master-addr=127.0.0.1", word) for word in words]
            variables = {entry["name"]: entry.get("value", str(number)) for entry in container["env"]}
            options = {"env": variables | self.environment, "cwd": self.folder, "stderr": subprocess.STDOUT}
            with (self.folder / f"log-{name}").open("ab") as log:
                return subprocess.Popen(command, stdout=log, **options)

        assert [start(container).wait() for container in spec["initContainers"]] == [0] * len(spec["initContainers"])
        self.processes[name] = start(*spec["containers"])
        facts = {"ready": True, "restartCount": 0, "image": "image", "imageID": "id"}
        status = {"name": "node", "state": {"running": {"startedAt": TIME}}, **facts}
        pod["status"] = {"phase": "Running", "containerStatuses": [status]}

    def log(self, name: str) -> bytes:
        self.processes[name].wait()
        return (self.folder / f"log-{name}").read_bytes()

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
        self.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Server
    log_message = Mock()

    def _send(self, body: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, content: dict[str, Any] | None, code: int = 200) -> None:
        if content is None:
            content, code = {"kind": "Status", "apiVersion": "v1", "message": f"no {self.path}", "code": 404}, 404
        self._send(json.dumps(content).encode(), "application/json", code)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match = PATH.fullmatch(url.path)
        if match is None:
            self._answer(discovered(url.path))
        elif match["log"]:
            self._send(self.server.log(match["name"]), "text/plain")
        elif match["name"]:
            self._answer(self.server.objects.get((match["plural"], match["name"])))
        else:
            labels = dict(part.split("=") for part in parse_qs(url.query)["labelSelector"][0].split(","))
            pods = [pod for pod in self.server.pods() if labels.items() <= pod["metadata"]["labels"].items()]
            self._answer({"kind": "PodList", "apiVersion": "v1", "items": pods})

    def _request(self) -> tuple[tuple[str, str], dict[str, Any]]:
        # Plural and name of the object, and the body
        content = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None
        return (match["plural"], match["name"] or content["metadata"]["name"]), content

    def do_POST(self) -> None:
        # An invalid object ends the request without an answer; the traceback is on standard error
        key, content = self._request()
        assert key not in self.server.objects
        self._answer(self.server.create(key[0], content), 201)

    def do_PATCH(self) -> None:
        key, changes = self._request()
        self.server.objects[key]["metadata"] |= changes["metadata"]
        self._answer(self.server.objects[key])

    def do_DELETE(self) -> None:
        key, _ = self._request()
        self._answer(self.server.delete(*key) if key in self.server.objects else None)
