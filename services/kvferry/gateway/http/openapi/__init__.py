"""The description of the clients' API in OpenAPI 3.1, made from the models and structs that the server uses.

A route is added in `operations.py`; must not describe fields by hand, and must not depend on the serving of requests.
"""
