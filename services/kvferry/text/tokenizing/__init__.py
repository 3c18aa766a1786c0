"""Tokenizers and detokenizers, from tokenizer.json and from the header of a GGUF file."""
