"""Roofline formulas: minimum bytes and operations of computations, performance targets.

All functions are pure; measurements are in the parent package.
"""
