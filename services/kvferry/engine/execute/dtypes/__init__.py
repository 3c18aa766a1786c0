"""Choice of the data type of KV and activations: as set, by the kernels, or by measurement.

A choice by measurement is recorded, so that all processes of a machine agree.
"""
