"""Conditions of a pool's status that follow from the reports of workers and the validity of certificates. Pure.

Each module has one subject; `plan.status` computes the other conditions and combines all. Must not import the API
client.
"""
