"""Record of the measured data type, so that all processes of a machine choose the same type."""

import fcntl
import json
import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path

from kvferry.core.dtypes import DTYPES
from kvferry.core.process.config import cache_dir
from kvferry.engine.execute.dtypes.compute_dtype import AUTO, choose_dtype, is_measured
from kvferry.weights.config import ModelConfig

_log = logging.getLogger(__name__)


def recorded_dtype(setting: str, config: ModelConfig, *, kernels: str) -> str:
    """Choose the data type in which this machine's CPU computes; return one of `DTYPES`.

    A measured choice is recorded in the cache folder. If the folder is read-only, an existing record is used; without
    one, each process measures.

    Args:
        setting: `auto`, or one of `DTYPES`.
        config: configuration of the model.
        kernels: one of `models.build.KERNELS`.

    Raises:
        UsageError: `setting` is unknown.
    """
    if not is_measured(setting, config, kernels=kernels):
        return choose_dtype(setting, config, kernels=kernels)
    key = f"{platform.machine()} {_cpu_name()} torch {version('torch')} {config.name}"
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "dtype.lock").open("w")
    except OSError as error:
        _log.info("cannot record the measured data type: %s", error)
        return choose_dtype(_read_record(folder / "dtype.json").get(key, AUTO), config, kernels=kernels)
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return choose_dtype(_recorded(key, folder / "dtype.json", kernels, config), config, kernels=kernels)


def _recorded(key: str, record: Path, kernels: str, config: ModelConfig) -> str:
    """Return the recorded choice; without a record, measure and record it."""
    known = _read_record(record)
    if key not in known:
        known[key] = choose_dtype(AUTO, config, kernels=kernels)
        fresh = record.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=1))
        fresh.replace(record)
    return known[key]


def _read_record(path: Path) -> dict[str, str]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):  # missing or damaged record: measure
        return {}
    return {k: v for k, v in read.items() if v in DTYPES} if isinstance(read, dict) else {}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    prefixes = ("model name", "cpu family", "model\t")
    return " ".join(line.partition(":")[2].strip() for line in lines[:30] if line.startswith(prefixes))
