"""The `kvferry` command: one module a subcommand, each loading what it needs only when it runs.

`options` turns settings into flags; `settings` lists what can be set. No logic of the product lives here.
"""
