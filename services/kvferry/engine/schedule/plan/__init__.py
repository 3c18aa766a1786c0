"""Step planning: scheduler, step budget, admission, steps that are launched ahead.

Pure. Scheduling decisions belong here. This package must not depend on where pages are stored or how a step is
executed.
"""
