"""The node: pods run with this machine's Python environment, and Services answer from outside of the cluster."""

import json
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from cluster.operators import eventually
from harness.kube import host_image
from kubernetes import client

pytestmark = [pytest.mark.cluster, pytest.mark.node]

SERVER = """
import http.server, os
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
http.server.HTTPServer(("", 8000), Hello).serve_forever()
"""


def container(**more: object) -> dict[str, object]:
    """Return a container with the strictest security settings that a namespace can require."""
    secure = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    base = {"name": "main", "image": host_image.NAME, "imagePullPolicy": "Never", "securityContext": secure}
    return {**base, **more}


def test_a_pod_runs_the_environment_of_this_machine(kube_node: Any, namespace: str) -> None:
    spec = {
        "runtimeClassName": "host",
        "restartPolicy": "Never",
        "containers": [container(args=["--help"])],
        "automountServiceAccountToken": False,
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "help"}, "spec": spec}
    kube_node.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(pod))
    kube_node.kubectl("wait", "-n", namespace, "pod/help", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    ended = client.CoreV1Api(kube_node.client).read_namespaced_pod("help", namespace).status.container_statuses[0]
    assert ended.state.terminated.exit_code == 0
    assert "gateway" in kube_node.kubectl("logs", "-n", namespace, "help")


def test_a_service_is_reachable_from_the_host(kube_node: Any, namespace: str) -> None:
    ready = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    serve = container(command=["python3", "-c", SERVER], readinessProbe=ready)
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"runtimeClassName": "host", "terminationGracePeriodSeconds": 0, "containers": [serve]},
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    kube_node.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(deployment))
    kube_node.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(service))
    kube_node.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    address = kube_node.kubectl("get", "-n", namespace, "service/web", "-o", "jsonpath={.spec.clusterIP}")
    answered = set()

    def both() -> bool:  # kube-proxy's rules may lag behind and refuse calls; each call may reach either pod
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
            answered.add(answer.read().decode())
        return len(answered) == 2

    eventually(both, f"both pods answer at {address}")
    pods = client.CoreV1Api(kube_node.client).list_namespaced_pod(namespace, label_selector="app=web").items
    assert answered == {pod.metadata.name for pod in pods}
