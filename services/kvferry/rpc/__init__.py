"""gRPC code shared by all processes: errors, servers, channels, message conversion, and text generation over token
streams.

May import core, model, the generated messages and grpc; never torch, an engine or a connector, so that a gateway
starts fast and stays small.
"""
