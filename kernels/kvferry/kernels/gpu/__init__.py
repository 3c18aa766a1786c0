"""The Triton family: kernels for GPUs, which Triton's interpreter runs on any CPU, slowly, for tests.

Reading order: `device`, `check` and `launch` (what every wrapper asks before a launch), then `rows`, `norms`, `heads`,
then attention: `plan`, `tiles`, `merge`, `attend`; then what a runner needs beside a model: `logits`, `draw`, `blocks`,
`digest`, `host_copies`. `family` is the table of all. A kernel is private to its module; the wrapper below it is what
is called. Nothing here is imported unless the family is asked for.
"""
