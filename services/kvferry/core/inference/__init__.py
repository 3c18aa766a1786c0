"""Values of requests for inference and of their results, which clients, text serving and both APIs share.

Imports the standard library only, and checks ranges only: clients load it without a tokenizer or a model.
"""
