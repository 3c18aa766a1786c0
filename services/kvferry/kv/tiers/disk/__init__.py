"""Disk tier: one file per storage object in a folder of bounded size, which workers on one host can share."""
