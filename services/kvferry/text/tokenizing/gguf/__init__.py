"""Tokenizers from the header of a GGUF file: byte-level BPE, and BPE of SentencePiece.

Headers have a vocabulary, and merges or scores, but only the name of the rule by which text is split.
"""
