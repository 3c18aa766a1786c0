"""Runs the quick starts of clients against `kvferry up`: `python -m harness.clients.matrix [CLIENT]...`.

Environments are made once in build/clients, from package registries: several GB, mostly for guidellm. Exit status 1 if
a client cannot be installed, or its quick start fails.
"""

import argparse
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from harness.clients.matrix.table import CLIENTS, Client, Language
from harness.servers.processes import running
from kvferry.core.clock import SystemClock

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "build" / "clients"
MODEL = "smollm2-135m-instruct"
_SCRIPTS = Path(__file__).with_name("quick_starts")
_INSTALL_SECONDS = 900.0
_SHOWN_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a quick start ended."""

    client: Client
    seconds: float
    failure: str = ""
    """End of the output; empty for a success."""

    @property
    def line(self) -> str:
        """Row of the printed table."""
        word = "failed" if self.failure else "works"
        return f"{self.client.name:14} {self.client.version:10} {word:7} {self.seconds:6.1f} s"


def command_of(client: Client, url: str) -> list[str]:
    """Return the command that runs a client's quick start; its environment is made now if its pinned packages changed.

    Raises:
        OSError: Node or Go is not installed.
        subprocess.SubprocessError: the packages cannot be installed in time, or the quick start cannot be compiled.
    """
    if not client.requirements:
        return [sys.executable, str(_SCRIPTS / client.script)]
    folder = FOLDER / client.quick_start
    note, wanted = folder / "requirements.txt", "\n".join(client.requirements)
    if not note.exists() or note.read_text("utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install(client, folder)
        note.write_text(wanted, "utf-8")
    if client.language is Language.PYTHON:
        return [str(folder / "bin" / "python"), str(_SCRIPTS / client.script)]
    if client.language is Language.GO:
        return _compiled(client, folder, url)
    script = folder / client.script  # Node finds the packages beside the script
    shutil.copyfile(_SCRIPTS / client.script, script)
    return ["node", str(script)]


def _install(client: Client, folder: Path) -> None:
    match client.language:
        case Language.NODE:
            install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        case Language.GO:
            _run(["go", "-C", str(folder), "mod", "init", "client"], _INSTALL_SECONDS)
            install = ["go", "-C", str(folder), "get"]
        case Language.PYTHON:
            _run([sys.executable, "-m", "venv", str(folder)], _INSTALL_SECONDS)
            python = str(folder / "bin" / "python")
            uv = shutil.which("uv", path=str(Path(sys.executable).parent))
            install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
            install += ["--quiet"]
    _run([*install, *client.requirements], _INSTALL_SECONDS)


def _compiled(client: Client, folder: Path, url: str) -> list[str]:
    """Compile a quick start in Go, with a client that is generated first if the table says so; return its command."""
    go = ["go", "-C", str(folder)]
    if client.generator:
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as answer:
            (folder / "openapi.json").write_bytes(answer.read())
        (folder / "api").mkdir(exist_ok=True)
        package = f"{client.requirements[0].partition('@')[0]}/{client.generator}"
        options = ["-generate", "types,client", "-package", "api", "-o", "api/api.go", "openapi.json"]
        _run([*go, "get", package], _INSTALL_SECONDS)
        _run([*go, "run", package, *options], _INSTALL_SECONDS)
    shutil.copyfile(_SCRIPTS / client.script, folder / "main.go")
    program = str(folder / client.quick_start)
    _run([*go, "build", "-mod=mod", "-o", program, "."], _INSTALL_SECONDS)
    return [program]


def tried(client: Client, url: str) -> Outcome:
    """Run the quick start of a client against the gateway at `url`."""
    clock = SystemClock()
    started, failure = clock.monotonic(), ""
    try:
        command = command_of(client, url)
        started = clock.monotonic()
        _run([*command, url, MODEL], client.seconds)
    except subprocess.CalledProcessError as error:
        failure = error.stdout or f"exit status {error.returncode}"
    except OSError as error:
        failure = str(error)
    except subprocess.TimeoutExpired as error:
        failure = f"not done within {error.timeout:.0f} s"
    return Outcome(client, clock.monotonic() - started, failure[-_SHOWN_CHARS:])


def chosen(names: list[str]) -> list[Client]:
    """Return the named clients, all without a name.

    Raises:
        SystemExit: a name is unknown.
    """
    if unknown := set(names) - {client.name for client in CLIENTS}:
        raise SystemExit(f"clients: {', '.join(unknown)} unknown; known: {', '.join(c.name for c in CLIENTS)}")
    return [client for client in CLIENTS if not names or client.name in names]


def _run(command: list[str], seconds: float) -> None:
    subprocess.run(
        command,
        timeout=seconds,
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def main() -> int:
    """Run the chosen quick starts in turn and print a table."""
    parser = argparse.ArgumentParser(prog="python -m harness.clients.matrix")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="name in docs/clients.md; all without one")
    clients = chosen(parser.parse_args().clients)
    outcomes = []
    with running("up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--json") as stack:
        url = f"http://{stack.wait_for('ready')['http']}"
        for client in clients:
            outcomes.append(tried(client, url))
            print(outcomes[-1].line, flush=True)
        stack.stop()
    failed = [outcome for outcome in outcomes if outcome.failure]
    for outcome in failed:
        print(f"\n{outcome.client.name}:\n{outcome.failure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
