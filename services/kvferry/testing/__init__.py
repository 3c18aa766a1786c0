"""What tests and only tests use: small models, scripted workers, builders. May import anything; nothing shipped
imports it.
"""
