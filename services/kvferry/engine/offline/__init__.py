"""The offline API: `LLM` and `AsyncLLM` complete prompts with one engine in this process.

The only part of the engine that processes text. It runs on the text serving of `kvferry.serving`.
"""
