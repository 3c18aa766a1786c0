"""The gateway: serves OpenAI's HTTP API and gRPC to clients, in front of prefill and decode workers.

`routing` and `lifecycle` make decisions and are pure; `fleet` and `dispatch` call workers; `http` serves clients;
`dashboard` has the page for administrators; `gateway` assembles these packages and `serve` runs the process. The
gateway loads no weights.
"""
