#!/usr/bin/env bash
# Two routers in front of OpenAI-compatible servers, vllm-router and smg, do not pass on requests to POST /v1/rerank: the
# server receives another model and no `top_n`, and the answer in the form of Jina and vLLM becomes status 500.
#
# Both read the body as SGLang's: `top_n` is not a field of it, and at /v1/rerank the model is replaced by a constant
# (at /rerank it is kept). They read the answer as SGLang's too, an array, so that vllm-router cannot be used with vLLM
# for this route. All other routes that were tried pass fields and answers on.
#
# Seen with vllm-router 0.1.17 and smg 1.13.0 (Python 3.11.7, Linux x86-64):
#   vllm-router /v1/rerank: server gets model 'default', top_n None; client gets 500 Failed to build rerank response
#   vllm-router /rerank: server gets model 'm', top_n None; client gets 500 Failed to build rerank response
#   smg /v1/rerank: server gets model 'unknown', top_n None; client gets 500 Failed to build rerank response
#   smg /rerank: server gets model 'm', top_n None; client gets 500 Failed to build rerank response
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --disable-pip-version-check install --quiet vllm-router==0.1.17 smg==1.13.0
cat > "$folder/try.py" <<'PYTHON'
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

BIN = sys.argv[1]
ANSWER = {"id": "r", "model": "m", "results": [{"index": 0, "relevance_score": 0.5, "document": {"text": "b"}}]}
received = []


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(ANSWER)

    def log_message(self, *_):
        pass


def free():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def ask(port, path):
    body = json.dumps({"model": "m", "query": "a", "documents": ["b", "c"], "top_n": 1}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def is_up(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return b'"m"' in answer.read()
    except OSError:
        return False


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
worker = f"http://127.0.0.1:{server.server_address[1]}"
for name, command, constant in (("vllm-router", ["vllm-router"], "default"), ("smg", ["smg", "launch"], "unknown")):
    port = free()
    words = [f"{BIN}/{command[0]}", *command[1:], "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(free()), "--worker-urls", worker]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not is_up(port):
                assert time.monotonic() < deadline, f"{name} does not start"
                time.sleep(0.2)
            for path, model in (("/v1/rerank", constant), ("/rerank", "m")):
                received.clear()
                status, text = ask(port, path)
                (body,) = received
                said = json.loads(text)["error"]["message"] if text.startswith("{") else text
                print(
                    f"{name} {path}: server gets model {body['model']!r}, top_n {body.get('top_n')}; "
                    f"client gets {status} {said}"
                )
                assert (body["model"], body.get("top_n"), status) == (model, None, 500)
        finally:
            process.kill()
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/venv/bin"
