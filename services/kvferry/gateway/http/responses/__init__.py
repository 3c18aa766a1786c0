"""OpenAI's Responses API for text: items and bodies, answers and events, responses that are kept for the next turn.

Prompts, functions, constraints and generation are those of chat; must not depend on the fleet or the HTTP server.
"""
