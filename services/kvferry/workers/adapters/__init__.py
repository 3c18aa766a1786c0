"""Loading of adapters while a worker serves: by calls of administrators, and from a list that is kept up to date.

Uses the engine's loop; must not import the services that call it.
"""
