"""The whole stack on one machine: starts gateway and workers as processes, watches them, restarts, stops them.

`layout` says which processes there are, `restarts` (pure) when one comes back, `supervisor` does it.
"""
