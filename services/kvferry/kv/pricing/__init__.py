"""Load-or-recompute cost model: estimates the time to load and the time to compute from earlier loads and steps.

Pure. Transports and tiers are only labels here.
"""
