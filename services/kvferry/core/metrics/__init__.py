"""Name, kind, labels and help of every metric, by the process that has it."""
