"""Measurements that users can repeat: each with its bound, taken in the same run, alternately."""
