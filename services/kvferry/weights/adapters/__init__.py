"""LoRA adapters as PEFT writes them: the configuration, the tensors checked against a model, the content digest.

Features that PEFT can write and the engine does not compute are refused by name. The only array library that this
package imports is numpy.
"""
