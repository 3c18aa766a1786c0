"""Model files and text processing: finds and reads model files, converts between text and tokens.

Uses numpy but not torch: the gateway uses this package for tokenization and must start without torch. The forward pass
is in `kvferry.engine`.
"""
