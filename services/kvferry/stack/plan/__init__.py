"""Plans a local stack: its processes and their restarts.

Pure functions from settings and a clock to command lines and delays.
"""
