"""Two turns with the fields and items that Codex sends to the Responses API."""

import json
import sys

import httpx

URL, MODEL = sys.argv[1:]
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
BODY = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "tools": [SHELL, PATCH, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"installation": "1"},
    "max_output_tokens": 24,
}


def message(role: str, text: str) -> dict[str, object]:
    """Return an input item of a message."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


TURN = [message("developer", "Ask before you write."), message("user", "List the files.")]
LATER = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
    {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a.txt\n"},
    message("assistant", "There is a.txt."),
    message("user", "Thank you."),
]
for items in (TURN, TURN + LATER):
    answer = httpx.post(f"{URL}/v1/responses", json={**BODY, "input": items}, timeout=100)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:])["type"] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")
