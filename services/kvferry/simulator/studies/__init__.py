"""Studies on simulated fleets: one run, the smallest fleet for a goal, the best settings."""
