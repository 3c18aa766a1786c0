"""Pools on a real node, for tests: applied, awaited, asked, hurt."""
