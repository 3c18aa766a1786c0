"""Writes or verifies generated files: `python -m harness.house.golden write|verify`.

- gRPC code from the `.proto` files
- golden vectors of hashes and wire formats (tests/golden/*.json)
- state diagrams and tables in the docs, between `<!-- generated: NAME -->` marks
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from harness.explorer import report
from harness.house import public_names, settings_page
from kvferry.core.hashing import BlockNamer
from kvferry.core.ids import BlockHash
from kvferry.core.philox import uniform
from kvferry.core.states import Machine
from kvferry.engine.schedule.step.sequence import SEQUENCE_MACHINE
from kvferry.gateway.batches.states import BATCH_MACHINE
from kvferry.gateway.decide.cache_map.map_states import MAP_MACHINE
from kvferry.gateway.decide.lifecycle.sample_states import MACHINE as RELEASE_MACHINE
from kvferry.kv.handoff.offers import OFFER_MACHINE
from kvferry.kv.handoff.transfers import TRANSFER_MACHINE
from kvferry.kv.interface.seals import AddressSeal, BlocksSeal, sealed_bytes
from kvferry.kv.interface.ticket import Keyring, Ticket, digest_tokens
from kvferry.kv.pages.layout import KvLayout
from kvferry.kv.tiers.interface.frame import Frames
from kvferry.kv.tiers.interface.tier import ObjectKey
from kvferry.kv.tiers.policy.breaker import BREAKER_MACHINE
from kvferry.rpc.access.call_keys import CallSigner, CallVerifier, role_key
from kvferry.rpc.access.table import CallerRole

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
MACHINES: tuple[Machine, ...] = (  # type: ignore[type-arg]
    SEQUENCE_MACHINE,
    OFFER_MACHINE,
    TRANSFER_MACHINE,
    RELEASE_MACHINE,
    BREAKER_MACHINE,
    MAP_MACHINE,
    BATCH_MACHINE,
)
_MARK = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def block_names() -> dict[str, object]:
    """Return the golden vectors of block names."""
    cases = []
    for tenant, fingerprint, block_tokens, extra, tokens in [
        ("", "", 1, "", [0]),
        ("", "", 4, "", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("tenant-a", "00ff", 4, "", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("tenant-b", "00ff", 4, "", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("tenant-a", "00ff", 4, "adapter", [1, 2, 3, 4]),
        ("tenant-a", "00ff", 16, "", list(range(4294967263, 4294967295))),
    ]:
        namer = BlockNamer(
            tenant=tenant.encode(),
            fingerprint=bytes.fromhex(fingerprint),
            block_tokens=block_tokens,
            extra=extra.encode(),
        )
        cases.append(
            {
                "tenant": tenant,
                "fingerprint": fingerprint,
                "block_tokens": block_tokens,
                "extra": extra,
                "tokens": tokens,
                "names": [name.hex() for name in namer.chain(tokens)],
            }
        )
    return {"cases": cases}


def tickets() -> dict[str, object]:
    """Return the golden vectors of tickets: body and sealed form."""
    ticket = Ticket(
        ticket_id="0123456789abcdef" * 2,
        worker_id="prefill-0",
        incarnation="fedcba9876543210",
        control_address="10.0.0.5:9100",
        connector="nixl",
        fingerprint=bytes(range(16)),
        scope="tenant-a",
        tokens_digest=digest_tokens([1, 2, 3]),
        num_tokens=17,
        block_ids=(3, 1 << 20),
        epochs=(1, 1 << 40),
        expires_wall=1_700_000_000.5,
    )
    layout = KvLayout("digest", "bfloat16", 32, 2, 128, 16, first_kv_head=4, total_kv_heads=8)
    of_a_share = msgspec.structs.replace(ticket, fingerprint=layout.fingerprint, layout=layout.description)
    return {
        "body": msgspec.msgpack.encode(ticket).hex(),
        "sealed": Keyring([b"golden key, 16 bytes or more"]).seal(ticket).hex(),
        "body_with_layout": msgspec.msgpack.encode(of_a_share).hex(),
    }


def call_keys() -> dict[str, object]:
    """Return the golden vectors of role keys, tokens of calls and proofs of servers."""
    secret, audience = b"golden key, 16 bytes or more", "10.0.0.5:9100"
    verifier = CallVerifier([secret])
    verifier.listen_at(audience)
    cases = []
    for role in CallerRole:
        key = role_key(secret, role)
        ((_, token),) = CallSigner(role, key).metadata("/kvferry.v1.WorkerAdmin/Status", audience)
        proof = verifier.proof(token, bytes(range(16))).hex()
        cases.append({"role": str(role), "key": key.hex(), "token": token, "proof": proof})
    return {"cases": cases}


def seals() -> dict[str, object]:
    """Return the golden vectors of the seals of messages between workers."""
    keyring = Keyring([b"golden key, 16 bytes or more"])
    address = AddressSeal("fedcba9876543210", "tcp", bytes(range(16)), b"address")
    blocks = BlocksSeal("0123456789abcdef" * 2, "fedcba9876543210", 3, (3, 1 << 20), (1, 1 << 40), (b"a", b"b"), ())
    return {
        "cases": [{"content": sealed_bytes(one).hex(), "seal": keyring.sign(one).hex()} for one in (address, blocks)]
    }


def layouts() -> dict[str, object]:
    """Return the golden vectors of layout fingerprints."""
    cases = [
        KvLayout("digest", "float32", 30, 3, 64, 16),
        KvLayout("digest", "bfloat16", 32, 8, 128, 16),
        KvLayout("digest", "int8", 32, 8, 128, 16),
        KvLayout("digest", "fp8", 32, 8, 128, 16),
        KvLayout("digest", "bfloat16", 60, 1, 576, 16, planes=1),
        KvLayout("digest", "bfloat16", 32, 2, 128, 16, first_kv_head=4, total_kv_heads=8),
    ]
    return {
        "cases": [
            {**msgspec.to_builtins(c), "fingerprint": c.fingerprint.hex(), "family": c.family.hex()} for c in cases
        ]
    }


def tier_frames() -> dict[str, object]:
    """Return the golden vectors of tier frames."""
    cases = []
    for tenant, pages, encrypt in [
        ("", 1, False),
        ("tenant-a", 300, False),
        ("tenant-b", 300, False),
        ("tenant-a", 300, True),
    ]:
        frames = Frames(b"golden secret, 16 bytes or more", pages, encrypt=encrypt, nonce=lambda n: bytes(range(n)))
        content = bytes(i % 251 for i in range(pages))
        header, stored = frames.frame(ObjectKey(BlockHash(bytes(range(32))), tenant), [memoryview(content)])
        cases.append(
            {
                "tenant": tenant,
                "encrypt": encrypt,
                "pages": content.hex(),
                "header": header.hex(),
                "stored": b"".join(stored).hex(),
            }
        )
    return {"cases": cases}


def draws() -> dict[str, object]:
    """Return the golden vectors of uniform random numbers by seed, stream and position."""
    cases = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (2**64 - 1, 3, 4096), (-1, 0, 7)]
    return {"cases": [{"seed": a, "stream": b, "position": c, "draw": uniform(a, b, c).hex()} for a, b, c in cases]}


def vectors() -> dict[Path, str]:
    """Return the content of each golden file, by path."""
    made = {
        "block_names": block_names(),
        "ticket": tickets(),
        "call_keys": call_keys(),
        "seals": seals(),
        "layouts": layouts(),
        "draws": draws(),
        "tier_frames": tier_frames(),
    }
    return {GOLDEN / f"{name}.json": json.dumps(value, indent=1) + "\n" for name, value in made.items()}


def documents() -> dict[Path, str]:
    """Return the content of every document with regenerated parts, by path."""
    parts = {machine.name: f"```mermaid\n{machine.mermaid()}\n```\n" for machine in MACHINES}
    parts |= {"scenarios": report.scenarios(), "mutations": report.mutations()} | public_names.parts()
    parts["settings"] = settings_page.settings()
    found: dict[Path, str] = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text("utf-8")
        found[path] = _MARK.sub(lambda m: m[1] + parts[m[2]] + m[3], text)
    return found


def generated_code() -> dict[Path, str]:
    """Generate gRPC code from the `.proto` files; return the content of each file, by path."""
    protos = sorted((ROOT / "proto" / "kvferry" / "v1").glob("*.proto"))
    binaries = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}={folder}" for kind in ("python_out", "grpc_python_out")]
        outputs += [f"--{kind}=quiet:{folder}" for kind in ("mypy_out", "mypy_grpc_out")]
        plugins = [f"--plugin=protoc-gen-{name}={binaries}/protoc-gen-{name}" for name in ("mypy", "mypy_grpc")]
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *plugins, *outputs]
        subprocess.run([*command, *map(str, protos)], check=True)
        made = Path(folder)
        return {ROOT / "proto" / p.relative_to(made): p.read_text("utf-8") for p in sorted(made.rglob("*_pb2*.py*"))}


def main(arguments: list[str]) -> int:
    """Write or verify all generated files; return the exit status."""
    if arguments not in (["write"], ["verify"]):
        sys.stderr.write("usage: python -m harness.house.golden write|verify\n")
        return 2
    wanted = {**vectors(), **documents(), **generated_code()}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    if arguments == ["write"]:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], "utf-8")
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
        return 0
    for path in stale:
        sys.stderr.write(f"{path.relative_to(ROOT)} is not up to date; run `make golden` and review the diff\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
