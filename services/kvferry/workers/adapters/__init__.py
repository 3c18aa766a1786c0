"""Loading of adapters while a worker serves: by calls of administrators, and from a list that is kept up to date.

Knows the engine's loop; does not know the services that call it.
"""
