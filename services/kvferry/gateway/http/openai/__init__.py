"""OpenAI's chat and text completions: fields, bounds, reading, responses and event streams.

Changes here change what clients see; must not know the fleet, the dispatcher or how the server speaks HTTP.
"""
