"""Values that scheduling decisions share: a sequence, the plan of a step, and what a step reports.

Pure. These modules decide nothing about what runs next; see `plan`.
"""
