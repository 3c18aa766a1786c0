"""Experts of a mixture on GPUs: pairs of row and expert in tiles (`expert_tiles`), then their products (`products`)."""
