"""The one table of settings: name, type, default, range or choices, help and scope of each.

`engine` has the settings of an engine as a dataclass, whose fields are also the arguments of `LLM` and the flags of
workers; `processes` has those of workers, gateways and local stacks. Flags, environment variables, settings files, the
fields of an InferencePool and the tables in docs derive from them or are checked against them. Adding a setting is one
entry here, and its use.

`setting` defines an entry, `parsers` converts text, and `resolve` finds a value in flags, environment, file or default.
"""
