#!/usr/bin/env bash
# NIXL 1.5.1 with UCX keeps one open file for each removed remote agent, in the process that removed it and in the
# peer's, until one of the two ends.
#
# A reader that adds a peer's agent, reads once, releases the handle and calls remove_remote_agent, and does this again
# and again for the same peer, has one open file more after each round, and so has the peer. A long-running process that
# removes agents of peers which come and go reaches its limit of open files. Without the removal, the number is constant.
#
# Seen with nixl-cu13 1.5.1, UCX in the wheel, connections between two processes of one host:
#   removed each time: reader +5, peer +5
#   kept: reader +0, peer +0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps nixl-cu13==1.5.1 numpy==2.3.5
cat > "$folder/agents.py" <<'PYTHON'
import os
import sys
from multiprocessing import get_context

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config

SIZE, ROUNDS = 1 << 16, 6


def make(name):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(SIZE, np.uint8)
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM", backends=["UCX"])
    return agent, memory


def open_files():
    return len(os.listdir("/proc/self/fd"))


def peer(pipe):
    agent, memory = make("peer")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while pipe.recv():
        agent.get_new_notifs()
        pipe.send(open_files())


def rounds(removes):
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=peer, args=(there,), daemon=True)
    child.start()
    metadata, remote = here.recv()
    agent, memory = make("reader")
    counts, name = [], None
    for _ in range(ROUNDS):
        if name is None:
            name = agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
        local = agent.get_xfer_descs([(memory.ctypes.data, SIZE, 0)], "DRAM")
        far = agent.get_xfer_descs([(remote, SIZE, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", local, far, name)
        agent.transfer(handle)
        while (state := agent.check_xfer_state(handle)) == "PROC":
            pass
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
        if removes:
            agent.remove_remote_agent(name)
            name = None
        here.send(True)
        counts.append((open_files(), here.recv()))
    here.send(False)
    child.join(10)
    return tuple(last - first for first, last in zip(counts[0], counts[-1]))


if __name__ == "__main__":
    found = {"removed each time": rounds(True), "kept": rounds(False)}
    for how, (reader, other) in found.items():
        print(f"{how}: reader +{reader}, peer +{other}")
    sys.exit(found != {"removed each time": (ROUNDS - 1, ROUNDS - 1), "kept": (0, 0)})
PYTHON
timeout 120 "$folder/venv/bin/python" "$folder/agents.py" 2>/dev/null | grep -v "NIXL INFO"
