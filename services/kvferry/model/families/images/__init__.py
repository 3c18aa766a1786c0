"""Model classes for text and images, of which the text part is served: its location, and the tensors that are left out.

Pure, like `families`. A class is a text family with a `TextPart`, and one line in the registry.
"""
