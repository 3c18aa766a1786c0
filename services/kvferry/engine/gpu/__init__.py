"""Steps on a GPU: captured, drawn there, and asked nothing on the way (docs/adr/0019-captured-steps.md)."""
