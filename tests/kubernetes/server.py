"""A small API server that validates objects against Kubernetes' schemas and runs pods as processes.

It has no kubelet and no scheduler: container arguments are started as a process, with volumes at their host
paths. Pods are replaced according to the failure policy of the Job.
"""

import json
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from encore.kubernetes.manifests import FILES, INDEX

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


def kubeconfig(cluster: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [],
        "clusters": [{"name": "test", "cluster": cluster}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}],
    }  # fmt: skip


class Server(ThreadingHTTPServer):
    """The API server of a test. Pods run at once, or stay pending with the message ``unschedulable``."""

    daemon_threads = True

    def __init__(self, folder: Path, environment: dict[str, str], unschedulable: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.environment, self.unschedulable = folder, environment, unschedulable
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.evicted: set[str] = set()
        self.problems: list[str] = []
        self.starts = 0

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        content = kubeconfig({"server": f"http://127.0.0.1:{self.server_port}"})
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

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
            threading.Thread(target=self._run, args=(content,), daemon=True).start()
        return content

    def delete(self, plural: str, name: str) -> None:
        owner = self.objects.pop((plural, name))["metadata"]["uid"]
        for key, content in [*self.objects.items()]:
            if owner in {reference["uid"] for reference in content["metadata"].get("ownerReferences", ())}:
                del self.objects[key]
                if key[1] in self.processes:
                    self.processes[key[1]].terminate()

    def evict(self, pod: str) -> None:
        self.evicted.add(pod)
        self.processes[pod].send_signal(signal.SIGTERM)

    # -- Job controller and kubelet -------------------------------------------------------------------

    def _run(self, job: dict[str, Any]) -> None:
        try:
            spec = job["spec"]
            pods = [self._pod(job, number) for number in range(spec["completions"])]
            while pods and not self.unschedulable:
                for pod in [pod for pod in pods if self.processes[pod].poll() is not None]:
                    code = self.processes[pod].returncode
                    action = self._action(spec, pod, code) if code else "Complete"
                    if action == "FailJob":
                        self._condition(job, "Failed", "PodFailurePolicy", f"Container node of {pod} failed: {code}")
                        for other in pods:
                            self.processes[other].terminate()
                        return
                    pods.remove(pod)
                    if action == "Ignore":
                        number = int(self.objects["pods", pod]["metadata"]["labels"][INDEX])
                        del self.objects["pods", pod]
                        pods.append(self._pod(job, number))
                time.sleep(0.05)
            if not self.unschedulable:
                self._condition(job, "Complete", "CompletionsReached", "")
        except Exception as error:
            self.problems.append(repr(error))
            self._condition(job, "Failed", "TestServer", repr(error))

    def _condition(self, job: dict[str, Any], kind: str, reason: str, message: str) -> None:
        job["status"] = {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}

    def _action(self, spec: dict[str, Any], pod: str, code: int) -> str:
        for rule in spec["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule and pod in self.evicted:
                return str(rule["action"])
            exits = rule.get("onExitCodes")
            if exits and (code in exits["values"]) == (exits["operator"] == "In"):
                return str(rule["action"])
        return "Count"

    def _pod(self, job: dict[str, Any], number: int) -> str:
        self.starts += 1
        name, template = f"{job['metadata']['name']}-{number}-{self.starts}", job["spec"]["template"]
        owner = {key: job["metadata"][key] for key in ("uid", "name")} | {"kind": "Job", "apiVersion": "batch/v1"}
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {
                "name": name, "labels": {**template["metadata"]["labels"], INDEX: str(number)},
                "ownerReferences": [owner], "creationTimestamp": f"2026-11-26T08:{self.starts:02}:00Z",
            },
        }  # fmt: skip
        if self.unschedulable:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": self.unschedulable,
            }
            pod["status"] = {"phase": "Pending", "conditions": [condition]}
        else:
            self._start(job["metadata"]["name"], pod, number)
        valid(pod)
        self.objects["pods", name] = pod
        return name

    def _start(self, job: str, pod: dict[str, Any], number: int) -> None:
        name, spec = pod["metadata"]["name"], pod["spec"]
        files = self.folder / f"files-{name}"
        files.mkdir()
        for file, text in self.objects["configmaps", job]["data"].items():
            (files / file).write_text(text, encoding="utf-8")

        def command(container: dict[str, Any]) -> list[str]:
            # Host names of the cluster cannot be resolved.
            words = [str(files) if word == FILES else word for word in container["args"]]
            return [re.sub(r"--master-addr=.*", "--master-addr=127.0.0.1", word) for word in words]

        def variables(container: dict[str, Any]) -> dict[str, str]:
            return {entry["name"]: entry.get("value", str(number)) for entry in container["env"]} | self.environment

        for container in spec["initContainers"]:
            subprocess.run(command(container), env=variables(container), cwd=self.folder, check=True)
        (node,) = spec["containers"]
        with (self.folder / f"log-{name}").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command(node), env=variables(node), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        state = {"running": {"startedAt": TIME}}
        status = {"name": "node", "state": state, "ready": True, "restartCount": 0, "image": "image", "imageID": "id"}
        pod["status"] = {"phase": "Running", "containerStatuses": [status]}

    def log(self, name: str, write: Any) -> None:
        with (self.folder / f"log-{name}").open("rb") as log:
            while True:
                has_ended = self.processes[name].poll() is not None
                write(log.read())
                if has_ended:
                    return
                time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes.values():
            with suppress(OSError):
                process.kill()
        self.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, content: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer_error(self, code: int, message: str) -> None:
        self._answer({"kind": "Status", "apiVersion": "v1", "message": message, "code": code}, code)

    def _body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

    def _discovery(self, path: str) -> dict[str, Any] | None:
        group = path.removeprefix("/apis/").removeprefix("/api/")
        versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in GROUPS if "/" in name]
        groups = [
            {"name": version["groupVersion"].split("/")[0], "versions": [version], "preferredVersion": version}
            for version in versions
        ]
        verbs = ["create", "delete", "get", "list", "patch"]
        resources = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
            for kind, plural in GROUPS.get(group, {}).items()
        ]
        answers: dict[str, dict[str, Any]] = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        }
        if resources:
            return {"kind": "APIResourceList", "groupVersion": group, "resources": resources}
        return answers.get(path)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        content, match = self._discovery(url.path), PATH.fullmatch(url.path)
        if match and match["log"]:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.server.log(match["name"], self.wfile.write)
            return
        if match and match["name"] is None:
            labels = dict(part.split("=") for part in parse_qs(url.query)["labelSelector"][0].split(","))
            pods = [pod for pod in self.server.pods() if labels.items() <= pod["metadata"]["labels"].items()]
            content = {"kind": "PodList", "apiVersion": "v1", "items": pods}
        elif match:
            content = self.server.objects.get((match["plural"], match["name"]))
        if content is None:
            self._answer_error(404, f"the server could not find {url.path}")
        else:
            self._answer(content)

    def _path(self) -> re.Match[str]:
        match = PATH.fullmatch(urlsplit(self.path).path)
        assert match is not None
        return match

    def do_POST(self) -> None:
        match, content = self._path(), self._body()
        if (match["plural"], content["metadata"]["name"]) in self.server.objects:
            self._answer_error(409, f"{match['plural']} {content['metadata']['name']!r} already exists")
            return
        try:
            self._answer(self.server.create(match["plural"], content), 201)
        except kubernetes_validate.ValidationError as error:
            self._answer_error(422, error.message)

    def do_PATCH(self) -> None:
        match = self._path()
        content = self.server.objects[match["plural"], match["name"]]
        content["metadata"] |= self._body()["metadata"]
        self._answer(content)

    def do_DELETE(self) -> None:
        match = self._path()
        self._body()
        if (match["plural"], match["name"]) in self.server.objects:
            self.server.delete(match["plural"], match["name"])
            self._answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        else:
            self._answer_error(404, f"{match['plural']} {match['name']!r} not found")
