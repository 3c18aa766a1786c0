"""The HTTP API: OpenAI's routes, schemas, responses and errors, administration, certificates.

Translates HTTP requests into calls to the text service; must not import workers or routing. The status of each error is
in `kvferry.core.errors`.
"""
