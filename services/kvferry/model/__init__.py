"""A model by name: opens its weights and its text together.

The forward pass is in `kvferry.engine.execute`.
"""
