"""The simulated fleet: gateway, members, the records of their requests, and what is measured."""
