"""Grammars of constrained outputs: from a client's schema, pattern or grammar to the tokens that may come next.

`grammar_text` translates constraints, `compiler` compiles them for a tokenizer, `grammar` holds the state of an
output. The parser is llguidance, which is imported on first use. This package must not import an engine or gRPC.
"""
