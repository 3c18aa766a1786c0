"""gRPC as all processes use it: errors, servers, channels, wire words, and text over a stream of tokens.

May import core, model, the generated messages and grpc; never torch, an engine or a connector, so that
a gateway stays small.
"""
