"""gRPC code shared by all processes: errors, servers, channels, authentication, message conversion, and the
`Inference` service.

May import core, text, serving, the generated messages and grpc; never torch, an engine or a connector, so that a
gateway starts fast and stays small.
"""
