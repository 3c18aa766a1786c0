"""Injects faults into real processes under load, for tests of the hand-off and the tiers.

`cases` lists the faults and the expected behavior; `traffic` sends requests continuously and checks every token;
`watch` polls the resources in use by workers; `trial` runs one case; `page` writes docs/faults.md from the results.
"""
