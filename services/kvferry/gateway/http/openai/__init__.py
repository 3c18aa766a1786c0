"""OpenAI's chat and text completions: fields, bounds, reading, responses and event streams.

Changes here are visible to clients; must not depend on the fleet, the dispatcher or the HTTP server.
"""
