"""Estimates of how long work takes on the workers, fitted to this gateway's requests, and records of dispatched work.

Pure: values and times in, seconds out. A new term of the routing cost begins here; choosing a worker does not belong
here (see `gateway.decide.routing`).
"""
