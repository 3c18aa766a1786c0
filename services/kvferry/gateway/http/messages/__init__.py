"""Anthropic's Messages API for text: blocks and bodies, answers and events, and the count of a prompt's tokens.

Prompts, tools, reasoning and generation are shared with chat. Must not depend on the fleet or the HTTP server.
"""
