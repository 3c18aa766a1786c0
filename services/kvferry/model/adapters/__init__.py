"""LoRA adapters as PEFT writes them: the configuration, the tensors checked against a model, the content digest.

What PEFT can write and the engine does not compute is refused by name. Imports no tensors library but numpy.
"""
