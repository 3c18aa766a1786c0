"""The front door: OpenAI's HTTP and our gRPC in, prefill and decode workers out.

`routing` and `release` decide and are pure; `fleet` and `dispatch` talk to workers; `http` and its neighbours
talk to clients; `serve` ties one process together. No weights, no tensors.
"""
