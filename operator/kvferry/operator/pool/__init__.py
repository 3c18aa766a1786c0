"""Values that describe a pool: API names, the parsed spec, and the observed facts.

Pure values without I/O, used by all other packages of the operator.
"""
