"""The connector layer: how a decode worker comes by the KV that a prefill worker computed.

Decisions are pure: `layout` (what bytes mean), `ticket` (what is promised), `offers` (the prefill side's machine),
`transfers` (the decode side's machine). `connector` is the interface every transport implements, `registry`
loads one by name, `fetcher` is the thin shell that carries a transfer out, `connectors` holds the transports.
Nothing here speaks gRPC; the control messages between workers go through the `PeerControl` protocol.
"""
