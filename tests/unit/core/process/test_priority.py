"""A background process has a low priority among all processes, not only within its session."""

import os
import subprocess
import sys

PROGRAM = """
import os
from pathlib import Path
from kvferry.core.process.priority import lower_priority
lower_priority(5)
group = Path("/proc/self/autogroup")
print(os.nice(0), os.getsid(0) == os.getpid(), group.read_text().split()[-1] if group.exists() else "5")
"""


def test_the_process_and_its_session_get_the_niceness() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    niceness, leads_session, group = found.stdout.split()
    assert int(niceness) == min(19, os.nice(0) + 5)
    assert leads_session == "True"
    assert group == "5"
