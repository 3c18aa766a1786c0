"""JSON Schemas for tests of constrained outputs: chosen ones, and generated ones."""
