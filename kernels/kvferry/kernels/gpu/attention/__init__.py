"""Paged attention on GPUs: `plan` divides a step's rows into tiles and partitions, `tiles` computes a tile, `merge`
merges partitions, `attend` launches them. Imports only `kernels`."""
