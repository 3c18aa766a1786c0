"""The `kvferry` command: a module per subcommand, imported only when the subcommand runs.

`options` converts settings to flags; `settings` lists all settings. This package has no serving logic.
"""
