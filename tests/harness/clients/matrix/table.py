"""The clients of docs/clients.md: pinned packages, and the quick start that uses them."""

from dataclasses import dataclass
from enum import Enum


class Language(Enum):
    """Language of a quick start; the value is the suffix of its file."""

    PYTHON = "py"
    NODE = "mjs"
    GO = "go"


@dataclass(frozen=True, slots=True)
class Client:
    """A client and its quick start."""

    name: str
    """Name in docs/clients.md."""
    requirements: tuple[str, ...]
    """Pinned packages of PyPI or npm, or Go modules, first that of the client; none for a body that is sent by plain
    HTTP."""
    quick_start: str
    """Name of the script in quick_starts."""
    language: Language = Language.PYTHON
    generator: str = ""
    """Go package, relative to the first module, that generates the client from the gateway's OpenAPI document."""
    seconds: float = 300.0
    """Time limit of the script in seconds; the first run compiles the packages."""

    @property
    def version(self) -> str:
        """Version of the first package; empty without one."""
        separator = "==" if self.language is Language.PYTHON else "@"
        return self.requirements[0].rpartition(separator)[2].removeprefix("v") if self.requirements else ""

    @property
    def script(self) -> str:
        """File name of the quick start."""
        return f"{self.quick_start}.{self.language.value}"


CLIENTS = (
    Client("openai", ("openai==3.57.0",), "openai_chat"),
    Client("openai (Node)", ("openai@7.59.0", "zod@4.6.7"), "openai_node", language=Language.NODE),
    Client("openai (Go)", ("github.com/openai/openai-go/v3@v3.98.0",), "openai_go", language=Language.GO),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_messages"),
    Client("openai-agents", ("openai-agents==0.24.0", "openai==3.57.0"), "agents_tool"),
    Client("litellm", ("litellm==1.110.2",), "litellm_providers"),
    Client(
        "langchain",
        ("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "openai==3.57.0"),
        "langchain_agent",
    ),
    Client(
        "LlamaIndex",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
        "llama_index_agent",
    ),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), "pydantic_outputs"),
    Client("instructor", ("instructor==1.17.0",), "instructor_modes"),
    Client(
        "AI SDK (Node)",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        "ai_sdk",
        language=Language.NODE,
    ),
    Client("Zod", ("zod@4.6.7",), "zod_kinds", language=Language.NODE),
    Client(
        "oapi-codegen (Go)",
        ("github.com/oapi-codegen/oapi-codegen/v2@v2.8.2", "github.com/oapi-codegen/runtime@v1.9.0"),
        "generated_go",
        language=Language.GO,
        generator="cmd/oapi-codegen",
    ),
    Client("smolagents", ("smolagents[openai]==1.26.0",), "smolagents_tool"),
    Client("lm-eval", ("lm-eval[api]==0.4.13",), "lm_eval_task"),
    Client("guidellm", ("guidellm==0.8.1",), "guidellm_run"),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_profile"),
    Client("vllm-router", ("vllm-router==0.1.17", "openai==3.57.0", "anthropic==2.14.0"), "vllm_router_front"),
    Client("smg", ("smg==1.13.0", "openai==3.57.0", "anthropic==2.14.0"), "smg_front"),
    Client("Codex", (), "codex_body"),
    Client("Claude Code", (), "claude_code_body"),
)
"""All clients, in the order of docs/clients.md."""
