"""Model checker for the hand-off: runs the production state machines through all orders of events and faults.

    scenario    requests, sizes and the faults that may be injected
    parts       the classes under test; a mutation replaces one of them
    network     messages in flight
    ledger      independent check that a prefill worker does not free pages too early
    prefill_actor, decode_actor, gateway_actor    minimal replacements for the code around the state machines
    world       a state of the model: possible actions, their effects, the invariants
    search      breadth-first search over distinct states; random walks for large scenarios
    shrink      shortens a failing trace
    mutations   deliberate bugs that verify the explorer

Run it with `python -m harness.explorer`; docs/explorer.md has scenarios, invariants and results.
"""
