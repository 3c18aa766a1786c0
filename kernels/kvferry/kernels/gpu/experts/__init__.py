"""MoE layers on GPUs: pairs of row and expert in tiles (`expert_tiles`), and their matrix products (`products`)."""
