"""Speculative decoding: which draft tokens a step verifies in addition to sampling, and how many. Pure.

Proposers guess a sequence's next tokens, and `draft_lengths` chooses how many of them to verify. Nothing here
computes KV or samples; verification is a part of every step's result (`schedule.step.step`).
"""
