"""Benchmarks: reproducible measurements, each compared with a bound that is measured in the same run."""
