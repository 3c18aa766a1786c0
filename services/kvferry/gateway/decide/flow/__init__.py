"""Flow control: queues in priority bands, weighted fairness between tenants, quotas, bounds, capacity of the fleet.

Pure: must not import gRPC or asyncio; the time is an argument.
"""
