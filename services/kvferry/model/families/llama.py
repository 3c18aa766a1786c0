"""Llama 2 and 3.x, and models of the same class: SmolLM, SmolLM 2, TinyLlama, Yi and others."""

from kvferry.model.families.family import Family

LLAMA = Family(
    name="llama", title="Llama 2 and 3.x, SmolLM, SmolLM 2", architecture="LlamaForCausalLM", reads_gguf=True
)
