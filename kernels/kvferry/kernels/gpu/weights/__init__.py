"""Projections with weights of 4 and 8 bits: their form in device memory (`packed`) and their products (`products`)."""
