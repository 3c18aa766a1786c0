"""The description of the client API in OpenAPI 3.1, generated from the models and structs that the server uses.

Routes are added in `operations.py`. Must not describe fields by hand, and must not depend on the serving of requests.
"""
