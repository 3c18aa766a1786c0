"""Text serving on top of a token source: prompts are tokenized, requests admitted, output is written as text.

Shared by the gateway, workers of role `both` and the offline API; independent of how tokens are generated
(`token_source`) and of the protocol of clients: it imports neither gRPC nor an engine.
"""
