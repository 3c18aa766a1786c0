"""Two turns, a count and a constrained answer with the fields and blocks that Claude Code sends to the Messages API."""

import json
import sys

import httpx

URL, MODEL = sys.argv[1:]
CACHED = {"type": "ephemeral"}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA},
    {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA, "cache_control": CACHED},
]
BODY = {
    "model": MODEL,
    "max_tokens": 24,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abcd"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {**CACHED, "ttl": "1h"}},
    ],
    "metadata": {"user_id": "user_1"},
    "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "authorization": "Bearer none",
}
TURN = [{"role": "user", "content": [{"type": "text", "text": "List the files.", "cache_control": CACHED}]}]
LATER = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "A command is needed.", "signature": "s"},
            {"type": "text", "text": "I list them."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "cache_control": CACHED},
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        ],
    },
]
TITLE = {
    "type": "object",
    "properties": {"title": {"type": "boolean"}},
    "required": ["title"],
    "additionalProperties": False,
}


def post(path: str, **body: object) -> httpx.Response:
    """Return the answer to a body; it must be a success."""
    answer = httpx.post(f"{URL}/v1/{path}?beta=true", json=body, headers=HEADERS, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer


for turns in (TURN, TURN + LATER):
    assert post("messages", **BODY, messages=turns).text.rstrip().endswith('{"type":"message_stop"}')
    assert post("messages/count_tokens", model=MODEL, messages=turns, tools=TOOLS).json()["input_tokens"]
config = {"format": {"type": "json_schema", "schema": TITLE}}
titled = post("messages", model=MODEL, max_tokens=60, messages=TURN, output_config=config).json()
assert json.loads(titled["content"][0]["text"]).keys() == {"title"}
