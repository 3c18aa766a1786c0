"""Every fault of the hand-off and of the tiers, as data, done to real processes under running requests.

`cases` says what is done, where, and what must come of it; `traffic` asks without pause and checks every token; `watch`
looks at what workers hold; `trial` does one case; `page` writes docs/faults.md from what was measured.
"""
