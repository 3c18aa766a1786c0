"""Tools that a request offers, the choice among them, and their form in the prompt.

A template that supports tools gets them unchanged; for other templates they are written into the system message.
"""
