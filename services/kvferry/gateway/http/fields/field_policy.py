"""What happens to the fields of requests, by the object that has them.

| effect | fields | answer |
| --- | --- | --- |
| honoured | the fields of the object's class, a `Strict`; not listed here | follows the field |
| accepted | listed here without a reason | as without the field; the header `kvferry-ignored` names it |
| refused | listed here with the reason why an answer without the field would be another one | 400 |
| unknown | all others | like accepted; 400 with the setting `strict_fields` |

A listed field with a neutral value, which requests what the answer is anyway, has no effect and is not named.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What happens to a field."""

    HONOURED = "honoured"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What happens to a field that is not implemented."""

    reason: str = ""
    """Why the answer would be another one without the field, which is therefore refused; empty for an accepted one."""
    neutral: tuple[object, ...] = (None,)
    """Values that request what the answer is anyway."""

    @property
    def effect(self) -> Effect:
        """Whether the field is accepted or refused."""
        return Effect.REFUSED if self.reason else Effect.ACCEPTED


Rules = Mapping[str, FieldRule]
"""Rules of an object by the names of its fields."""

ACCEPTED = FieldRule()
_TEXT_ONLY = "answers are text"
_NO_STATE = "the gateway keeps no such object"

_ACCOUNTING: Rules = {
    "kv_transfer_params": ACCEPTED,
    "metadata": FieldRule(neutral=(None, {})),
    "request_id": ACCEPTED,
    "safety_identifier": ACCEPTED,
    "service_tier": FieldRule(neutral=(None, "auto", "default")),
    "store": FieldRule(neutral=(None, False)),
    "user": ACCEPTED,
    "verbosity": FieldRule(neutral=(None, "medium")),
    "vllm_xargs": ACCEPTED,
}
"""Hints about scheduling, accounting and abuse, which are not part of the question."""

_ALL_HINTS: Rules = {
    **_ACCOUNTING,
    "kv_hints": ACCEPTED,
    "prompt_cache_key": ACCEPTED,
    "prompt_cache_options": ACCEPTED,
    "prompt_cache_retention": ACCEPTED,
    "session_id": ACCEPTED,
}
"""Hints of requests without output tokens, whose prompts are not kept (`fields.cache_fields`)."""

_GENERATION: Rules = {
    **_ACCOUNTING,
    "audio": FieldRule(_TEXT_ONLY),
    "guided_decoding_backend": ACCEPTED,
    "guided_whitespace_pattern": FieldRule("white space of a constrained output follows the constraint alone"),
    "logits_processors": FieldRule("no code of requests is run"),
    "modalities": FieldRule(_TEXT_ONLY, (None, ["text"])),
    "moderation": FieldRule("answers are not moderated"),
    "prediction": ACCEPTED,
    "prompt_embeds": FieldRule("prompts are text or token ids"),
    "repetition_detection": FieldRule("an answer is not ended for its repetitions; use repetition_penalty"),
    "return_tokens_as_token_ids": FieldRule("tokens are returned as text; use return_token_ids", (None, False)),
    "spaces_between_special_tokens": ACCEPTED,
    "stream_interval": ACCEPTED,
    "web_search_options": FieldRule("the gateway searches no web"),
}

CHAT: Rules = {
    **_GENERATION,
    "add_special_tokens": FieldRule("the chat template adds the special tokens", (None, False)),
    "chat_template": FieldRule("templates of requests are not run; the model's template is used"),
    "echo": FieldRule("the last message is not repeated", (None, False)),
    "function_call": FieldRule("use tools and tool_choice", (None, "none", "auto")),
    "functions": FieldRule("use tools", (None, [])),
    "mm_processor_kwargs": FieldRule(_TEXT_ONLY, (None, {})),
    "prompt": FieldRule("a conversation is sent in messages"),
}
"""Body of POST /v1/chat/completions."""

COMPLETION: Rules = {
    **_GENERATION,
    "messages": FieldRule("conversations are answered by POST /v1/chat/completions"),
    "thinking_token_budget": FieldRule("reasoning is recognized in POST /v1/chat/completions"),
    "parallel_tool_calls": ACCEPTED,
    "suffix": FieldRule("text is continued at its end only", (None, "")),
    "tool_choice": FieldRule("functions are called in POST /v1/chat/completions", (None, "none", "auto")),
    "tools": FieldRule("functions are called in POST /v1/chat/completions", (None, [])),
}
"""Body of POST /v1/completions."""

TOKENS: Rules = {
    **{name: rule for name, rule in _ACCOUNTING.items() if name not in ("request_id", "verbosity")},
    "features": FieldRule(_TEXT_ONLY),
}
"""Body of POST /inference/v1/generate."""

TOKEN_SAMPLING: Rules = {
    "bad_words_token_ids": ACCEPTED,
    "detokenize": FieldRule(neutral=(None, False, True)),
    "extra_args": FieldRule(neutral=(None, {})),
    "flat_logprobs": FieldRule("log-probabilities are objects per token", (None, False)),
    "logits_processors": FieldRule("no code of requests is run", (None, [])),
    "output_kind": ACCEPTED,
    "repetition_detection": FieldRule("an answer is not ended for its repetitions; use repetition_penalty"),
    "skip_reading_prefix_cache": ACCEPTED,
    "spaces_between_special_tokens": ACCEPTED,
    "stream_interval": ACCEPTED,
    "thinking_token_budget": FieldRule("reasoning is recognized in POST /v1/chat/completions"),
}
"""The object `sampling_params` of POST /inference/v1/generate."""

RESPONSE: Rules = {
    **{name: rule for name, rule in _ACCOUNTING.items() if name not in ("metadata", "store", "user", "verbosity")},
    "access_programs": FieldRule(_NO_STATE),
    "background_options": FieldRule("responses in the background have no options"),
    "context_management": FieldRule("use POST /v1/responses/compact", (None, [])),
    "conversation": FieldRule(f"{_NO_STATE}; use previous_response_id"),
    "image": FieldRule(_TEXT_ONLY),
    "max_tool_calls": ACCEPTED,
    "messages": FieldRule("a conversation is sent in input"),
    "moderation": FieldRule("answers are not moderated"),
    "prompt": FieldRule(f"{_NO_STATE}; use instructions and input"),
}
"""Body of POST /v1/responses."""

FILE: Rules = {}
"""Form of POST /v1/files."""

BATCH: Rules = {}
"""Body of POST /v1/batches."""

EMBEDDINGS: Rules = {**_ALL_HINTS, "truncate_prompt_tokens": FieldRule("inputs are used as a whole")}
"""Body of POST /v1/embeddings."""

SCORE: Rules = {
    **_ALL_HINTS,
    "truncate_prompt_tokens": FieldRule("texts are used as a whole"),
    "truncation": FieldRule("texts are used as a whole", (None, False)),
}
"""Body of POST /v1/score."""

RERANK: Rules = {
    **SCORE,
    "max_chunks_per_doc": FieldRule("a document has one score"),
    "max_tokens_per_doc": FieldRule("documents are used as a whole"),
    "rank_fields": FieldRule("documents are texts"),
    "return_embeddings": FieldRule("the answer has scores only; use POST /v1/embeddings", (None, False)),
}
"""Body of POST /v1/rerank."""

TOKENIZE: Rules = {
    "chat_template": CHAT["chat_template"],
    "mm_processor_kwargs": CHAT["mm_processor_kwargs"],
}
"""Body of POST /tokenize."""

MESSAGE: Rules = {
    "annotations": FieldRule(neutral=(None, [])),
    "audio": FieldRule(_TEXT_ONLY, (None, [])),
    "function_call": FieldRule("calls are sent in tool_calls", (None, [])),
    "id": ACCEPTED,
    "partial": FieldRule("use continue_final_message", (None, False)),
    "prefix": FieldRule("use continue_final_message", (None, False)),
    "provider_specific_fields": ACCEPTED,
    "reasoning_details": ACCEPTED,
    "thinking_blocks": ACCEPTED,
}
"""Message of a conversation; clients copy fields of answers into it."""

PART: Rules = {"annotations": ACCEPTED, "id": ACCEPTED}
"""Part of a message's content."""

TOOL_CALL: Rules = {
    "cache_control": ACCEPTED,
    "extra_content": ACCEPTED,
    "index": ACCEPTED,
    "provider_specific_fields": ACCEPTED,
}
"""Call in an assistant's message; `index` is its number in a stream."""

STREAM_OPTIONS: Rules = {"include_obfuscation": FieldRule(neutral=(None, False))}
"""Options of a stream, whose events have no padding."""

STRUCTURED: Rules = {
    "disable_additional_properties": FieldRule("write additionalProperties into the schema", (None, False)),
    "disable_any_whitespace": ACCEPTED,
    "disable_fallback": ACCEPTED,
    "whitespace_pattern": FieldRule("set x-guidance.whitespace_pattern at the root of the schema"),
}
"""The object `structured_outputs`."""

REASONING: Rules = {
    "enabled": FieldRule("use effort", (None, True)),
    "generate_summary": ACCEPTED,
    "summary": ACCEPTED,
}
"""The object `reasoning`."""

RESPONSE_TOOL: Rules = {
    "allowed_callers": FieldRule("the model calls functions itself", (None, ["direct"])),
    "async": FieldRule("a result follows its call", (None, False)),
    "cache_control": ACCEPTED,
    "defer_loading": FieldRule("all functions are in the prompt", (None, False)),
    "output_schema": ACCEPTED,
}
"""Tool of the Responses API."""

RESPONSE_TEXT: Rules = {"verbosity": FieldRule(neutral=(None, "medium"))}
"""The object `text`."""

RESPONSE_PART: Rules = {"annotations": FieldRule(neutral=(None, [])), "logprobs": FieldRule(neutral=(None, []))}
"""Part of a message or result of the Responses API, with fields of an earlier response's output."""

RESPONSE_MESSAGE: Rules = {"phase": ACCEPTED}
"""Item of type message."""

RESPONSE_CALL: Rules = {
    "async": FieldRule("a result follows its call", (None, False)),
    "caller": FieldRule("the model calls functions itself"),
    "namespace": FieldRule("functions have plain names"),
}
"""Item of type function_call."""

RESPONSE_COMPACTION: Rules = {"created_by": ACCEPTED}
"""Item of type compaction."""

COMPACT: Rules = {
    **{name: rule for name, rule in RESPONSE.items() if name not in ("background_options", "max_tool_calls")},
    "background": FieldRule("a summary is the answer to its request", (None, False)),
    "include": ACCEPTED,
    "metadata": ACCEPTED,
    "parallel_tool_calls": ACCEPTED,
    "store": ACCEPTED,
    "stream": FieldRule("a summary is answered as a whole", (None, False)),
    "stream_options": ACCEPTED,
    "text": ACCEPTED,
    "tool_choice": ACCEPTED,
    "truncation": ACCEPTED,
    "user": ACCEPTED,
}
"""Body of POST /v1/responses/compact."""

MESSAGES: Rules = {
    "billing_policy": ACCEPTED,
    "compaction": FieldRule("conversations are not summarized"),
    "container": ACCEPTED,
    "context_management": ACCEPTED,
    "diagnostics": ACCEPTED,
    "fallback_credit_token": ACCEPTED,
    "fallbacks": FieldRule("one model is served", (None, [])),
    "inference_geo": ACCEPTED,
    "mcp_servers": FieldRule("the gateway calls no servers", (None, [])),
    "service_tier": FieldRule(neutral=(None, "auto", "standard_only")),
    "speed": FieldRule(neutral=(None, "standard")),
    "thread": FieldRule(f"{_NO_STATE}; send the whole conversation"),
    "user_profile_id": ACCEPTED,
    "workspace_id": ACCEPTED,
}
"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

CLIENT_TOOL: Rules = {
    "allowed_callers": FieldRule(neutral=(None, ["direct"])),
    "defer_loading": FieldRule(neutral=(None, False)),
    "eager_input_streaming": ACCEPTED,
    "input_examples": ACCEPTED,
}
"""Tool of the Messages API."""

THINKING: Rules = {"display": ACCEPTED}
"""The object `thinking` of the Messages API."""

TEXT_BLOCK: Rules = {"citations": ACCEPTED, "parsed_output": ACCEPTED}
"""Text of the Messages API, with fields of earlier answers."""

CALL_BLOCK: Rules = {"caller": ACCEPTED, "toolset_name": ACCEPTED}
"""Call or result of the Messages API."""
