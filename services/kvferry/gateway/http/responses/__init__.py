"""OpenAI's Responses API for text: items and bodies, answers and events, responses that are kept for the next turn.

Prompts, tools, constraints and generation are shared with chat. Must not depend on the fleet or the HTTP server.
"""
