"""Beam search: which partial outputs continue (`beams`, pure), and their computation by an engine (`beam_search`).

An engine does not implement beams: each step of a beam is a request for one token with the log-probabilities of its
alternatives.
"""
