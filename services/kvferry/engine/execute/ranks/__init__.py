"""Tensor parallelism on one host: processes ("ranks") compute one model together, each with a share of its weights.

    worker process, rank 0                                      process of rank 1, 2, ..
    scheduler, sampler, connectors, first share of the weights  another share of the weights
        | StepBatch, over a socket pair  ------------------------>  |
        | embedding, layers  <---- sums, in shared memory ------>   | embedding, layers
        | logits, in shared memory  <------------------------------ | its part of the vocabulary

The KV pages are shared memory too, and whole: each rank reads and writes its KV heads in place. Everything outside of
this package (block tables, connectors, tiers, proofs of hand-offs) therefore works as with one process.
"""
