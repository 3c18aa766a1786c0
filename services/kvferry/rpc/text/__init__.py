"""Text serving on top of a token source: tokenizes prompts, detokenizes output, implements the `Inference` service.

Shared by the gateway and workers of role `both`; independent of how tokens are generated (`token_source`).
"""
