"""The gRPC services of a worker: `Prefill`, `Decode`, `KvTransfer`, `KvEvents`, `WorkerAdmin`.

Services validate messages and use the engine only through `engine.loop`.
"""
