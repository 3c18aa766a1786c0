"""Block names in the gateway equal those of the workers; requests are distributed by their leading blocks."""

from harness.fakes.engines import an_engine

from kvferry.core.hashing import BlockNamers
from kvferry.core.ids import WorkerId
from kvferry.gateway.decide.routing.cached_prefix import block_names, prefix_key, routing_key
from kvferry.gateway.decide.routing.routes import Replica

TENANT_KEY = b"secret"
NAMERS = BlockNamers(TENANT_KEY)


def replica(layout: bytes = b"layout", block_tokens: int = 4) -> Replica:
    return Replica("a:1", WorkerId("a"), layout + b"|tcp|", 0, layout_fingerprint=layout, block_tokens=block_tokens)


def key(tokens: list[int], tenant: str = "", blocks: int = 2, of: Replica | None = None) -> bytes:
    return prefix_key(NAMERS, tenant, tokens, blocks)(of or replica())


def test_names_are_those_of_the_engine() -> None:
    engine, _ = an_engine(block_tokens=4)
    tokens = list(range(11))
    of = replica(layout=b"test layout")
    for tenant in ("", "a"):
        names = block_names(NAMERS, tenant, of, tokens)
        assert names == engine.namer(tenant).chain(tokens)
        assert len(names) == 2


def test_requests_are_equal_in_their_leading_blocks() -> None:
    system = [1, 2, 3, 4, 5, 6, 7, 8]
    assert key([*system, 9, 9]) == key([*system, 1, 2, 3, 4, 5])
    assert key(system) != key([*system[:-1], 0])
    assert key([1, 2, 3, 4, 5]) == key([1, 2, 3, 4, 6])
    assert key([1, 2, 3]) != key([1, 2, 4])


def test_a_prefix_key_is_the_name_of_a_leading_block() -> None:
    tokens = list(range(20))
    assert key(tokens) == block_names(NAMERS, "", replica(), tokens)[1]


def test_tenants_and_layouts_do_not_share_keys() -> None:
    tokens = [1, 2, 3, 4]
    assert key(tokens, tenant="a") != key(tokens, tenant="b")
    assert key(tokens) != key(tokens, of=replica(b"other"))
    assert key(tokens) != key(tokens, of=replica(block_tokens=2))


def test_an_affinity_key_replaces_the_beginning_of_the_prompt_within_a_scope() -> None:
    def key(scope: str, tokens: list[int], affinity: str) -> bytes:
        return routing_key(NAMERS, scope, tokens, 2, affinity)(replica())

    assert key("a", list(range(40)), "session") == key("a", [7] * 40, "session")
    assert key("a", list(range(40)), "session") != key("a", list(range(40)), "other")
    assert key("a", list(range(40)), "session") != key("b", list(range(40)), "session")
    assert key("a", list(range(40)), "") == prefix_key(NAMERS, "a", list(range(40)), 2)(replica())
