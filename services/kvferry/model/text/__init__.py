"""Text processing for a model: tokenizer, chat template, incremental detokenizer, stop strings.

User text cannot produce control tokens; templates run in a sandbox. Independent of gRPC and HTTP.
"""
