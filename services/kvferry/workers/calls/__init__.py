"""What all gRPC services of a worker share: its context, and the trace of a call."""
