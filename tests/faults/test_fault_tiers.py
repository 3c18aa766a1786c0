"""Redis and disks that exit, hang, fill up, disappear or return wrong data, under a running stack."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis
from harness.faults import cases
from harness.faults.cases import Case
from harness.faults.traffic import Ended, Question
from harness.faults.trial import Felt, Row, tiers_used, undergo
from harness.faults.watch import tier_failures
from harness.servers.processes import RunningProcess, running
from harness.servers.redis_relay import Relay, relay
from harness.servers.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.long

FLAGS = ("--model", "tiny", "--dtype", "float32", "--threads", "1", "--load-policy", "always", "--log-level", "error")
ADDRESSES = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json")
DISK_BYTES = 64 << 20


@dataclass
class Stack:
    """A running `kvferry up` with few pages over tiers, and the storage of its last tier."""

    process: RunningProcess
    admin: list[str]
    gateway: str
    tier: str
    """Name of the tier whose loads and failures are counted."""
    below: "Redis | Disk"

    @property
    def failures(self) -> int:
        return tier_failures(self.admin, self.tier)

    def more_failures(self) -> Felt:
        """Return a function that tells whether the tier has failed since this call."""
        before = self.failures
        return lambda: self.failures > before


class Redis:
    """A server that can be killed and started again, reached directly or through a relay."""

    def __init__(self, resources: ExitStack, *, is_relayed: bool) -> None:
        self._resources = resources
        self.server: RedisServer = resources.enter_context(redis_server())
        self.relay: Relay | None = None
        if is_relayed:
            self.relay = resources.enter_context(relay(str(self.server.socket_path)))

    @property
    def url(self) -> str:
        return self.server.tcp if self.relay is None else f"redis://127.0.0.1:{self.relay.port}"

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server = self._resources.enter_context(redis_server(port=self.server.port))
        if self.relay is not None:
            self.relay.target = str(self.server.socket_path)

    def client(self) -> "redis.Redis[bytes]":
        return redis.Redis(unix_socket_path=str(self.server.socket_path))


class Disk:
    """A folder on a small file system of its own where mounting is permitted, else in `folder`."""

    def __init__(self, resources: ExitStack, folder: Path) -> None:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        is_root = os.geteuid() == 0
        self.mounted = (
            folder if is_root and not subprocess.run(mount, capture_output=True, check=False).returncode else None
        )
        if self.mounted is not None:
            resources.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
        self.folder = folder / "kv"

    @property
    def url(self) -> str:
        return f"disk://{self.folder}?size=1GiB&direct=off"

    def files(self) -> list[Path]:
        """Return the files of whole objects, without those that are being written."""
        found = [Path(root) / name for root, _, names in os.walk(self.folder) for name in names]
        return [path for path in found if len(path.name) == 64]


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as resources:
        below: Redis | Disk
        if request.param == "disk":
            below, tier = Disk(resources, tmp_path_factory.mktemp("disk")), "disk"
        else:
            below, tier = Redis(resources, is_relayed=request.param == "dram + redis"), "redis"
        # 512 KiB of DRAM hold a tenth of the prompts' KV.
        tiers = ["--tier", "dram://?size=512KiB"] if request.param == "dram + redis" else []
        tiers += ["--tier", below.url]
        process = resources.enter_context(running("up", *FLAGS, *ADDRESSES, "--kv-memory", "768KiB", *tiers))
        ready = process.wait_for("ready")
        admin = ready["workers"]
        assert isinstance(admin, dict)
        yield Stack(process, list(admin.values()), str(ready["grpc"]), tier, below)
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("stack", "case"),
    [pytest.param(c.group, c, id=c.name) for c in cases.of_groups(*cases.TIERS)],
    indirect=["stack"],
    scope="module",
)
def test_fault(stack: Stack, case: Case, question_list: list[Question], keep: Callable[[Row], None]) -> None:
    fault = next(fault for words, fault in FAULTS.items() if case.fault.startswith(words))

    def tier_is_used(ended: Sequence[Ended]) -> bool:
        return stack.tier in tiers_used(ended)

    keep(
        undergo(
            case,
            lambda: fault(stack),
            gateway=stack.gateway,
            admin=stack.admin,
            question_list=question_list,
            is_normal=tier_is_used,
        )
    )


# ---------------------------------------------------------------------- Redis


@contextmanager
def killed(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    felt = stack.more_failures()
    stack.below.kill()
    try:
        yield felt
    finally:
        stack.below.start()


@contextmanager
def restarted(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    stack.below.kill()
    stack.below.start()
    yield lambda: True


@contextmanager
def frozen(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    felt, victim = stack.more_failures(), stack.below.server.process
    victim.send_signal(signal.SIGSTOP)
    try:
        yield felt
    finally:
        victim.send_signal(signal.SIGCONT)


@contextmanager
def values_flipped(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    felt = stack.more_failures()
    with stack.below.client() as client:
        names = client.keys("kv:*")
        assert names
        for name in names:
            flip_value(client, name)
        yield felt


def flip_value(client: "redis.Redis[bytes]", name: bytes) -> None:
    """Flip one bit in the middle of a value, unless the value is gone."""
    middle = int(client.strlen(name)) // 2
    if middle:
        (old,) = client.getrange(name, middle, middle) or b"\0"
        client.setrange(name, middle, bytes([old ^ 0x10]))


@contextmanager
def bits_flipped_on_the_way(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    assert stack.below.relay is not None
    felt = stack.more_failures()
    stack.below.relay.flips = True
    try:
        yield felt
    finally:
        stack.below.relay.flips = False


@contextmanager
def out_of_memory(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Redis)
    felt, server = stack.more_failures(), stack.below.server
    with stack.below.client() as client:
        client.flushall()
        server.ask(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        server.ask(b"CONFIG", b"SET", b"maxmemory", b"1mb")
        try:
            yield felt
        finally:
            server.ask(b"CONFIG", b"SET", b"maxmemory", b"1gb")


# ---------------------------------------------------------------------- disk


def make_room(stack: Stack) -> Disk:
    """Remove half of the files, so that objects are stored again."""
    assert isinstance(stack.below, Disk)
    for path in stack.below.files()[::2]:
        path.unlink(missing_ok=True)
    return stack.below


@contextmanager
def full(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Disk)
    felt = stack.more_failures()
    with ExitStack() as afterwards:
        if stack.below.mounted is not None:
            ballast = stack.below.mounted / "ballast"
            afterwards.callback(ballast.unlink)
            make_room(stack)
            fill(ballast)
        else:  # without a file system of its own, limit the length of files to less than an object
            for worker in psutil.Process(stack.process.process.pid).children():
                limits = worker.rlimit(psutil.RLIMIT_FSIZE)
                assert limits is not None
                afterwards.callback(worker.rlimit, psutil.RLIMIT_FSIZE, limits)
                worker.rlimit(psutil.RLIMIT_FSIZE, (1024, limits[1]))
            make_room(stack)
        yield felt


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (1 << 16))
        except OSError:
            return


@contextmanager
def cut(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Disk)
    files = stack.below.files()
    assert files
    whole = {path: path.stat().st_size for path in files}
    for path in files:
        os.truncate(path, whole[path] // 2)
    yield lambda: any(path.exists() and path.stat().st_size == whole[path] for path in files)


@contextmanager
def flipped(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Disk)
    felt, files = stack.more_failures(), stack.below.files()
    assert files
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (old,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old ^ 0x10]))
    yield felt


@contextmanager
def gone(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Disk)
    felt = stack.more_failures()
    away = stack.below.folder.with_name("away")
    stack.below.folder.rename(away)
    shutil.rmtree(away)
    try:
        yield felt
    finally:
        stack.below.folder.mkdir()


@contextmanager
def read_only(stack: Stack) -> Iterator[Felt]:
    assert isinstance(stack.below, Disk)
    if stack.below.mounted is None:
        pytest.skip("mounting a file system needs root")
    felt = stack.more_failures()
    make_room(stack)
    remount(stack.below.mounted, "ro")
    try:
        yield felt
    finally:
        remount(stack.below.mounted, "rw")


def remount(folder: Path, how: str) -> None:
    """Remount a file system; retry, because remounting read-only fails during a write."""
    pause = threading.Event()
    for _ in range(500):
        if not subprocess.run(
            ["mount", "-o", f"remount,{how}", str(folder)], capture_output=True, check=False
        ).returncode:
            return
        pause.wait(0.01)
    raise AssertionError(f"{folder} cannot be remounted {how}")


FAULTS: dict[str, Callable[[Stack], AbstractContextManager[Felt]]] = {
    "Redis is killed": killed,
    "Redis is restarted": restarted,
    "Redis is frozen": frozen,
    "bits of every stored value": values_flipped,
    "bits are flipped on the way": bits_flipped_on_the_way,
    "Redis is out of memory": out_of_memory,
    "the disk is full": full,
    "every file is cut": cut,
    "bits of every file": flipped,
    "the folder is gone": gone,
    "the disk is read-only": read_only,
}
