"""The gateway: serves OpenAI's HTTP API and gRPC to clients, in front of prefill and decode workers.

`decide` has the decisions and is pure; `fleet` and `dispatch` call workers; `admission` makes requests wait; `http`
serves clients; `observe` has metrics and the page for administrators; `gateway` assembles these packages and `serve`
runs the process. The gateway loads no weights.
"""
