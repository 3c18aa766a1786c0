"""Pauses of generation and changes of the weights, as a worker's administration makes them."""
