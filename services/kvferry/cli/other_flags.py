"""Flags of vLLM that have another name here, or need not be set: what to use instead of each."""

from collections.abc import Mapping

VLLM_FLAGS: Mapping[str, str] = {
    "--tensor-parallel-size": "use --tensor-parallel",
    "--max-num-batched-tokens": "use --token-budget",
    "--block-size": "use --block-tokens",
    "--kv-cache-dtype": "use --dtype, such as --dtype fp8",
    "--speculative-config": "use --speculation",
    "--lora-modules": "use --adapter NAME=PATH",
    "--max-loras": "use --adapter-slots",
    "--max-lora-rank": "use --max-adapter-rank",
    "--scheduling-policy": "use --scheduling",
    "--api-key": "use --api-keys-file",
    "--allowed-origins": "use --cors-origins",
    "--kv-transfer-config": "use --prefill, --decode and --connector",
    "--kv-offloading-size": "use --tier, such as --tier dram://?size=4GiB",
    "--cpu-offload-gb": "use --weights and --dtype for smaller weights and KV; weights are not moved during a step",
    "--otlp-traces-endpoint": "use --otlp",
    "--enable-lora": "leave it out; --adapter suffices",
    "--enable-prefix-caching": "leave it out; prompts are always cached",
    "--enable-chunked-prefill": "leave it out; --max-chunk-tokens sets the size of chunks",
    "--enable-auto-tool-choice": "leave it out; --tool-call-parser auto is the default",
    "--quantization": "leave it out; the model's files say how they are quantized",
    "--trust-remote-code": "leave it out; code of models is never run",
    "--chat-template": "leave it out; the template of the model's files is used",
}
"""Remedy by flag of `vllm serve`."""
