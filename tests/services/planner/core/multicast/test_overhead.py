"""How weights get to targets, and what loads taught of each way."""

from __future__ import annotations

from services.planner.core.multicast.overhead import MAX_KNOWN, Loaded, Overheads, Way, ways_of
from shared.messages.plans import Chain, Hop, SourceKind, Stripe


def chain(*hops: Hop) -> Chain:
    return Chain(hops=hops, chunk_bytes=1 << 20)


def hop(targets: str, *sources: tuple[str, SourceKind]) -> Hop:
    """Each target gets a stripe of each source."""
    names = tuple(targets.split())
    return Hop(
        targets=names,
        stripes=tuple(Stripe(source=s, source_kind=kind, target=t) for t in names for s, kind in sources),
        predicted_finish_s=1.0,
    )


def load(overhead_s: float, kind: SourceKind = "gpu", hops: int = 0) -> Loaded:
    return Loaded(Way(kind, hops), overhead_s / 2, overhead_s)


class Taught(Overheads):
    """One operation a second."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def teach(self, model_hash: str, loads: list[Loaded]) -> None:
        self.now_s += 1.0
        self.learn(model_hash, loads, self.now_s, self.now_s + 0.5)


def test_hops_count_from_the_copy_that_a_chain_starts_at_through_branches_too() -> None:
    found = ways_of([
        chain(hop("a b", ("w", "gpu")), hop("c", ("a", "gpu"), ("b", "gpu")), hop("d", ("c", "gpu"))),
        chain(hop("e", ("c", "gpu"))),
        chain(hop("f", ("", "disk")), hop("g", ("f", "gpu"))),
        chain(hop("h", ("h", "host"))),
        chain(hop("i", ("a", "host"))),
    ])  # fmt: skip
    assert found == {
        "a": ("gpu", 0),
        "b": ("gpu", 0),
        "c": ("gpu", 1),
        "d": ("gpu", 2),
        "e": ("gpu", 2),
        "f": ("disk", 0),
        "g": ("disk", 1),
        "h": ("host", 0),
        "i": ("host", 0),
    }


def test_kinds_of_sources_and_models_are_apart_and_of_an_operations_targets_the_median_counts() -> None:
    known = Taught()
    for _ in range(5):
        known.teach("m", [load(0.1), load(0.2), load(9.0), load(0.5, "disk"), load(0.7, "disk", hops=2)])
        known.teach("n", [load(1.0)])
    assert known.of("m", "gpu").after(0) == 0.2
    assert known.of("m", "disk").after(0) == 0.5
    assert round(known.of("m", "disk").after(1), 6) == 0.6
    assert known.of("n", "gpu").after(0) == 1.0
    assert known.of("n", "gpu").before(0) == 0.5


def test_what_only_later_hops_told_is_not_taken_for_the_first_ones() -> None:
    known = Taught()
    before = known.of("m", "gpu")
    known.teach("m", [load(5.0, hops=3)])
    known.teach("m", [])
    assert known.of("m", "gpu") == before


def test_the_models_that_were_not_loaded_for_longest_are_forgotten_beyond_a_number() -> None:
    known = Taught()
    for number in range(MAX_KNOWN):
        for _ in range(5):
            known.teach(f"m{number}", [load(1.0)])
    known.teach("m0", [load(1.0)])
    known.teach("new", [load(1.0)])
    assert known.of("m0", "gpu").after(0) == known.of("m2", "gpu").after(0) == 1.0
    assert known.of("m1", "gpu").after(0) == 0.5, "as one that was never loaded"


def test_however_many_operations_met_a_stall_at_the_same_time_it_says_nothing() -> None:
    known = Taught()
    for _ in range(5):
        known.teach("m", [load(0.1)])
    before = known.of("m", "gpu"), known.of("never loaded", "gpu")
    for number in range(4):
        known.learn("m", [load(8.0 - number)], known.now_s + number, known.now_s + 8.0)
        known.learn(f"m{number}", [load(8.0 - number)], known.now_s + number, known.now_s + 8.0)
    assert (known.of("m", "gpu"), known.of("never loaded", "gpu")) == before


def test_operations_at_the_same_time_teach_what_the_fastest_of_them_took() -> None:
    known = Overheads()
    for began_s in range(0, 40, 4):
        for after_s, overhead_s in ((2.0, 0.3), (1.0, 0.1), (0.0, 0.2)):
            known.learn("m", [load(overhead_s)], began_s + after_s, began_s + 2.5)
    assert known.of("m", "gpu").after(0) == 0.1
