"""The `Inference` gRPC service on top of `kvferry.serving`, and the conversion of its messages."""
