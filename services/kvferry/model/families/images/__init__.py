"""Classes of models for text and images, of which the text part is served: where it is, and which tensors are left out.

Pure, as `families`. A class is a text family with a `TextPart`, and one line in the registry.
"""
