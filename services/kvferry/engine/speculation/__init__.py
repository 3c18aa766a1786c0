"""Speculative decoding: which tokens a step verifies beyond the sampled ones, and how many. Pure.

Proposers guess a sequence's next tokens, and lengths say how many of the guesses are worth verifying. Nothing here
computes KV or samples; verification is a part of every step's result (`plan.step`).
"""
