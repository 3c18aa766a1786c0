"""TLS of a pool: certificates of the pool's processes, read from files that are renewed while processes run.

`authority` makes certificates, `written_files` writes them, `certificate_files` reads and checks them, `pool_tls` gives
them to gRPC, and `refusal_cause` determines why a connection is refused. Only `pool_tls` imports gRPC; the package must
not depend on roles or tokens.
"""
