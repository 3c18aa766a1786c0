"""Custom resource definitions of other projects, from their Go modules."""

import json
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.kube import recipes, toolchain

from kvferry.core.process.config import child_environment

FILE = Path(__file__).with_name("neighbours.toml")


def downloaded(module: str, version: str) -> dict[str, Any]:
    """Return Go's description of a fetched module; skip the test where the module cannot be fetched."""
    words = [toolchain.find(recipes.read().go), "mod", "download", "-json", f"{module}@{version}"]
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(words, cwd=empty, env=child_environment({}), capture_output=True, text=True, timeout=250)
    module_info = dict(json.loads(done.stdout or "{}"))
    if "Dir" not in module_info:
        pytest.skip(f"{module} cannot be fetched: {module_info.get('Error') or done.stderr.strip()}")
    return module_info


def definition(name: str) -> dict[str, Any]:
    """Return the definition called `name` in neighbours.toml; skip the test where it cannot be fetched."""
    wanted = tomllib.loads(FILE.read_text())[name]
    module_info = downloaded(wanted["module"], wanted["version"])
    assert module_info["Sum"] == wanted["sum"], f"the checksum of {wanted['module']} has changed"
    return dict(yaml.safe_load((Path(module_info["Dir"]) / wanted["path"]).read_text()))
