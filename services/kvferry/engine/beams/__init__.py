"""Beam search with an engine (`beam_search`); `model.requests.beams` decides which partial outputs continue.

An engine does not implement beams: each step of a beam is a request for one token with the log-probabilities of its
alternatives.
"""
