"""Load or recompute: the cheaper choice is made, over a wide sweep of machines, links and lengths."""

import random
from dataclasses import dataclass

import pytest

from kvferry.kv.pricing.price import LoadPolicy, Piece, PriceBook
from kvferry.kv.pricing.rates import RecentFit

TOKEN_BYTES = 23_040
OBJECT_TOKENS = 64


@dataclass(frozen=True)
class World:
    """True durations, which the price book estimates."""

    trip: float
    bytes_per_second: float
    step: float
    token: float
    pair: float

    @classmethod
    def drawn(cls, rng: random.Random) -> "World":
        return cls(
            trip=10 ** rng.uniform(-4, -1.5),
            bytes_per_second=10 ** rng.uniform(7, 10),
            step=10 ** rng.uniform(-3, -1.7),
            token=10 ** rng.uniform(-5, -2.5),
            pair=10 ** rng.uniform(-9, -6.5),
        )

    def load(self, num_tokens: int) -> float:
        return self.trip + num_tokens * TOKEN_BYTES / self.bytes_per_second

    def steps(self, first: int, count: int) -> float:
        """Return the time to compute `count` tokens after `first` ones, in steps of up to 512."""
        seconds = 0.0
        while count > 0:
            chunk = min(512, count)
            seconds += self.step + self.token * chunk + self.pair * (chunk * first + chunk * (chunk - 1) / 2)
            first, count = first + chunk, count - chunk
        return seconds

    def compute(self, count: int) -> float:
        """Return the time that computing these tokens adds. One step runs in any case."""
        return self.steps(0, count + 1) - self.steps(count, 1)


def a_taught_book(world: World, rng: random.Random) -> PriceBook:
    book = PriceBook()
    for _ in range(30):
        tokens = OBJECT_TOKENS * rng.choice([1, 2, 4, 8, 16, 32])
        book.observe_load("redis", tokens * TOKEN_BYTES, world.load(tokens) * rng.lognormvariate(0, 0.1))
        first, count = rng.choice([0, 0, 512, 1024]), rng.choice([17, 64, 200, 511])
        book.observe_compute(first, count, world.steps(first, count) * rng.lognormvariate(0, 0.1))
    return book


def test_loading_or_computing_is_chosen_by_speed_in_a_sweep() -> None:
    rng = random.Random(20261121)
    wrong: list[tuple[World, int]] = []
    num_choices = 0
    for _ in range(150):
        world = World.drawn(rng)
        book = a_taught_book(world, rng)
        for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
            made = book.decide([Piece("redis", tokens, tokens * TOKEN_BYTES)], 0)
            num_choices += 1
            if not made.is_forced and (made.num_loaded > 0) != (world.load(tokens) < world.compute(tokens)):
                wrong.append((world, tokens))
    assert len(wrong) <= 0.05 * num_choices, f"{len(wrong)} of {num_choices} choices were wrong"


def test_a_link_that_slows_down_is_noticed() -> None:
    book = PriceBook()
    pieces = [Piece("redis", OBJECT_TOKENS, OBJECT_TOKENS * TOKEN_BYTES)] * 8
    for _ in range(20):
        book.observe_compute(0, 512, 0.3)
        book.observe_load("redis", 8 * OBJECT_TOKENS * TOKEN_BYTES, 0.01)
    assert book.decide(pieces, 0).num_loaded == 512
    for _ in range(20):
        book.observe_load("redis", 8 * OBJECT_TOKENS * TOKEN_BYTES, 2.0)
    assert book.decide(pieces, 0).num_loaded == 0


def test_a_head_in_memory_is_loaded_and_an_expensive_tail_computed() -> None:
    book = PriceBook()
    size = OBJECT_TOKENS * TOKEN_BYTES
    for _ in range(20):
        book.observe_compute(0, 256, 0.1)
        book.observe_load("dram", 4 * size, 0.001)
        book.observe_load("disk", 4 * size, 3.0)
    pieces = [Piece("dram", OBJECT_TOKENS, size)] * 3 + [Piece("disk", OBJECT_TOKENS, size)] * 5
    made = book.decide(pieces, 0)
    assert made.num_loaded == 3 * OBJECT_TOKENS
    assert made.num_tokens == 8 * OBJECT_TOKENS
    assert made.load_seconds < made.compute_seconds


def test_the_more_expensive_choice_is_measured_again_occasionally() -> None:
    book = PriceBook()
    for _ in range(20):
        book.observe_compute(0, 256, 0.05)
        book.observe_load("disk", 64 * TOKEN_BYTES, 0.03)
    pieces = [Piece("disk", OBJECT_TOKENS, OBJECT_TOKENS * TOKEN_BYTES)]
    made = [book.decide(pieces, 0) for _ in range(64)]
    assert sum(m.is_forced for m in made) == 2
    assert all((m.num_loaded > 0) == m.is_forced for m in made)


def test_a_far_more_expensive_choice_is_not_measured_again() -> None:
    book = PriceBook()
    for _ in range(20):
        book.observe_compute(0, 256, 0.001)
        book.observe_load("disk", 64 * TOKEN_BYTES, 3.0)
    assert not any(book.decide([Piece("disk", 64, 64 * TOKEN_BYTES)], 0).num_loaded for _ in range(100))


def test_each_peer_has_prices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kv.pricing.price._MAX_PLACES", 2)
    book = PriceBook()
    for _ in range(10):
        book.observe_compute(0, 256, 0.1)
        book.observe_load("peer", 10_000_000, 0.005, place="near")
        book.observe_load("peer", 10_000_000, 5.0, place="far")
    assert book.decide([Piece("peer", 256, 10_000_000, "near")], 0).num_loaded == 256
    assert book.decide([Piece("peer", 256, 10_000_000, "far")], 0).num_loaded == 0
    assert book.decide([Piece("peer", 256, 10_000_000, "unknown")], 0).source == "peer", (
        "the record of the oldest peer was dropped"
    )
    assert len(book._loads) == 2


def test_policy_always_loads_in_every_case() -> None:
    book = PriceBook(LoadPolicy.ALWAYS)
    book.observe_load("disk", 1000, 99.0)
    made = book.decide([Piece("disk", 1, 1000)], 0)
    assert (made.num_loaded, made.is_forced) == (1, True)


def test_a_decision_without_pieces_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one piece"):
        PriceBook().decide([], 0)


def test_computing_nothing_costs_nothing() -> None:
    assert PriceBook().compute_seconds(10, 0) == 0.0


@pytest.mark.parametrize("wrong", [(), (1.0, 0.0), (-1.0,)])
def test_a_prior_is_positive(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="positive"):
        RecentFit(wrong)


def test_a_fit_finds_both_coefficients_and_never_goes_negative() -> None:
    fit = RecentFit((1.0, 1.0))
    for x in (10, 500, 100, 1000, 50) * 4:
        fit.observe((1.0, x), 0.2 + 0.003 * x)
    assert fit.seconds((1.0, 2000)) == pytest.approx(6.2, rel=0.02)
    for x in (10, 500, 100, 1000, 50) * 8:  # the times fall with x, so no positive slope fits
        fit.observe((1.0, x), 5.0 - 0.001 * x)
    assert fit.seconds((1.0, 0)) >= 0.0
    assert fit.seconds((1.0, 1e6)) >= fit.seconds((1.0, 0))
