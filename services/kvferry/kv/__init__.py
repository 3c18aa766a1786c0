"""KV transfer and storage: connectors between workers, hand-off protocol, tiers, and the load-or-recompute cost model.

Decisions are pure functions: `pages.layout` (layout of a page's bytes), `interface.ticket` (sealed reference to a
prefill worker's pages), `handoff.offers` (state machine of the prefill side), `handoff.transfers` (state machine of the
decode side). `interface.connector` is the interface that every transport implements, `registry` imports a transport by
name, `fetcher` executes transfers, `connectors` contains the transports. This package does not use gRPC; control
messages between workers go through the `PeerControl` protocol.
"""
