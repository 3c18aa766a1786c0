"""Explores the hand-off: every order of events and faults in a small world, the production machines inside.

    scenario    what there is to do, and which faults the adversary may spend
    parts       the classes under test; a mutation swaps one of them
    network     messages on their way
    ledger      a second opinion on when a prefill worker may give pages back
    prefill_actor, decode_actor, gateway_actor    thin stand-ins for the shells around the machines
    world       one state: what can happen in it, what happens then, what must hold
    search      breadth first with every state seen once; random walks beyond that
    shrink      a shorter trace that still fails
    mutations   the machine broken on purpose, to see that the explorer notices

`python -m kvferry.testing.explorer` runs it; docs/explorer.md says what was found to hold.
"""
