"""Authentication and authorization of calls between kvferry's processes.

`table` contains which role may call which method, `call_keys` derives the roles' keys and makes the tokens of calls,
`hosts` determines which addresses belong to a server. `guard` checks every call of a server, and `signed_channel` adds
the tokens to a client's calls. The package does not handle clients' API keys, which only the gateway has.
"""
