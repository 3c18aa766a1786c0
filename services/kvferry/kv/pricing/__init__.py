"""Load-or-recompute cost model: estimates the seconds of loading and computing from earlier loads and steps.

Pure. Transports and tiers are only labels here.
"""
