"""The process environment: environment variables, settings files, CPU cores, logs, the parent process.

All other code receives these values as arguments. This package must not import gRPC, an engine or an event loop.
"""
