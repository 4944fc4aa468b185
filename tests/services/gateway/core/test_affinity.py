"""Which prompts belong together, and where the router sends them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from msgspec import structs

from services.gateway.core.affinity import SharedBeginnings
from services.gateway.core.router import AffinityPolicy, Router
from services.gateway.core.stream import StreamState
from services.worker.core.scheduling.beginnings import Beginnings
from shared.messages.load import HotPrefix, LoadReport
from shared.prefixes import STEP_TOKENS, prefix_root
from tests.services.gateway.core.routing import load_report, route, stream

SCOPE = "scope"
ROOT = prefix_root("", SCOPE)


def prompt(name: str, token_ids: Sequence[int], *, scope: str = SCOPE, key: str = "") -> StreamState:
    return replace(
        stream(name, max_tokens=16), prompt_token_ids=tuple(token_ids), cache_scope=scope, prompt_cache_key=key
    )


def text(seed: int, steps: float) -> list[int]:
    return random.Random(seed).choices(range(1000), k=int(steps * STEP_TOKENS))


def place(known: SharedBeginnings, token_ids: Sequence[int], *, scope: str = SCOPE, key: str = "") -> int | None:
    return known.beginning_of(prompt("r", token_ids, scope=scope, key=key), b"secret")


def report_of(name: str, beginnings: Beginnings, *, busy_s: float = 0.0) -> LoadReport:
    return structs.replace(
        load_report(name),
        counted_tokens=round(beginnings.tokens),
        hot_prefixes=beginnings.hottest,
        busy_s_total=busy_s,
    )


SECONDS = count()


def told(known: SharedBeginnings, name: str, beginnings: Beginnings, *, busy: float = 1.0) -> None:
    """Twice, half a second apart, of which it was busy for so much."""
    now_s = float(next(SECONDS)) + 1.0
    for again in (0.0, 0.5):
        known.reported(report_of(name, beginnings, busy_s=now_s + busy * again), 4, now_s + again)


def counted(*prompts: Sequence[int]) -> Beginnings:
    beginnings = Beginnings()
    for token_ids in prompts:
        beginnings.count(ROOT, token_ids)
    return beginnings


# --- places ------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_belong_together_and_others_do_not() -> None:
    known = SharedBeginnings()
    first = text(1, 1.5)
    assert place(known, first) == place(known, first + text(2, 5)) is not None
    assert place(known, first) != place(known, text(3, 1.5))
    assert place(known, first) != place(known, first, scope="another key's")
    assert place(known, first) != place(known, first, key="mine")


def test_short_prompts_and_those_without_a_scope_belong_nowhere() -> None:
    known = SharedBeginnings()
    assert place(known, text(1, 0.9)) is None
    assert place(known, text(1, 2), scope="") is None
    assert place(known, text(1, 0.9), key="mine") == place(known, text(2, 0.2), key="mine") is not None


def test_what_more_begin_with_than_one_instance_can_do_is_told_apart_behind_it() -> None:
    system = text(0, 3)
    known = SharedBeginnings()
    beginnings = counted(*(system + text(n, 2) for n in range(1, 100)))
    told(known, "a", beginnings, busy=0.1)
    assert len({place(known, system + text(n, 2)) for n in range(1, 100)}) == 1, "it takes little of an instance"
    told(known, "a", beginnings)
    places = {place(known, system + text(n, 2)) for n in range(1, 100)}
    assert len(places) > 90
    assert place(known, system + text(1, 2)) == place(known, system + text(1, 2) + text(500, 9))
    assert place(known, system) is None, "it does not go on behind it"
    assert place(known, text(7, 4)) is not None


def test_what_is_told_apart_stays_so_until_it_is_clearly_less() -> None:
    system = text(0, 3)
    hot = [system + text(n, 1) for n in range(1, 200)]
    known = SharedBeginnings()
    for share, is_hot in ((0.45, True), (0.2, True), (0.1, False), (0.2, False), (0.45, True)):
        others = [text(1000 + n, 4) for n in range(int(len(hot) * (1 / share - 1)))]
        mixed = [*hot, *others]
        random.Random(1).shuffle(mixed)
        told(known, "a", counted(*mixed))
        assert (place(known, hot[0]) != place(known, hot[1])) == is_hot, share


def test_all_instances_words_count_and_those_of_the_gone_do_not() -> None:
    system = text(0, 3)
    hot = [system + text(n, 1) for n in range(1, 65)]
    cold = [text(1000 + n, 4) for n in range(64)]
    known = SharedBeginnings()
    for name in "bcde":
        told(known, name, counted(*cold, *cold))
    told(known, "a", counted(*hot))
    assert place(known, hot[0]) == place(known, hot[1])
    known.keep({"a"})
    told(known, "a", counted(*hot))
    assert place(known, hot[0]) != place(known, hot[1])
    known.keep(())
    assert (known._tokens, known._busy, known._known, known._hot, known._said) == (0, 0.0, {}, {}, {})


def test_a_hostile_word_ends_with_who_said_it() -> None:
    known = SharedBeginnings()
    lies = tuple(HotPrefix(name=bytes([n]) * 16, first=b"f" * 16, steps=1 + n, tokens=2**53) for n in range(8))
    bad = structs.replace(load_report("bad"), counted_tokens=1, hot_prefixes=(*lies[:7], lies[0]))
    for now_s in range(3):
        known.reported(structs.replace(bad, busy_s_total=float(now_s)), 4, float(now_s))
    known.reported(structs.replace(bad, hot_prefixes=lies[3:], busy_s_total=1e18), 4, 3.0)
    assert place(known, text(1, 2)) is not None
    known.keep(())
    assert (known._tokens, known._busy, known._known, known._hot, known._said) == (0, 0.0, {}, {}, {})


def test_what_instances_say_twice_of_nothing_or_against_each_other_can_be_taken_back() -> None:
    known = SharedBeginnings()
    nothing, five = (HotPrefix(name=b"n" * 16, first=b"f" * 16, steps=2, tokens=tokens) for tokens in (0, 5))
    other = HotPrefix(name=b"n" * 16, first=b"g" * 16, steps=3, tokens=5)
    for said in ((nothing,), (five, nothing), (other, five), ()):
        for name in "ab":
            bad = structs.replace(load_report(name), counted_tokens=9, hot_prefixes=said)
            known.reported(bad, 4, float(next(SECONDS)))
            known.reported(structs.replace(bad, hot_prefixes=(nothing, five)), 4, float(next(SECONDS)))
    known.keep("a")
    known.keep(())
    assert (known._tokens, known._known, known._hot, known._said) == (0, {}, {}, {})


# --- what instances count ----------------------------------------------------------------


def test_an_instance_says_where_its_prompts_part() -> None:
    system, other = text(0, 5), text(1, 2)
    beginnings = counted(
        *([*(system + text(9 + n, 3) for n in range(60)), *(other + text(99 + n, 1) for n in range(20))])
    )
    assert [(hot.steps, hot.first != hot.name) for hot in beginnings.hottest] == [(5, True), (2, True)]
    assert sum(hot.tokens for hot in beginnings.hottest) <= beginnings.tokens * 1.01


def test_a_conversation_parts_nowhere_and_a_prompt_that_many_send_does() -> None:
    turns = [text(0, 1 + length) for length in range(24)]
    assert counted(*turns, *turns).hottest == ()
    assert [hot.steps for hot in counted(*([text(0, 3.5)] * 32)).hottest] == [3]


def test_it_stays_small_whatever_comes() -> None:
    beginnings = counted(*(text(n, 200) for n in range(200)))
    assert beginnings.hottest == ()
    assert len(beginnings._known) <= 4096 + 128
    beginnings = counted(*(text(0, n % 130) for n in range(600)))
    assert len(beginnings.hottest) <= 8


# --- the router --------------------------------------------------------------------------


class Sending:
    def __init__(self, *names: str, running: int = 8, **policy: float) -> None:
        self.router = Router(max_queued_requests=100, affinity=AffinityPolicy(secret=b"s", **policy))  # type: ignore[arg-type]
        self.router.set_routes("m", "", [route(name, running=running) for name in names])
        self.num = 0

    def send(self, token_ids: Sequence[int], *, ends: bool = True, **options: str) -> str:
        one = prompt(f"r{self.num}", token_ids, **options)
        self.num += 1
        self.router.enqueue(one, deadline_s=10.0, retry_after_s=1.0)
        (sent,) = self.router.dispatch("m", now_s=0.0).assignments
        self.router.bookings.started(one.request_id)
        if ends:
            self.router.finish(one.request_id, "m")
        return sent.route.instance_id


def test_a_conversation_stays_where_it_is_and_conversations_spread() -> None:
    sending = Sending("a", "b", "c", "d")
    homes = Counter()
    for n in range(200):
        turns = [sending.send(text(n, 2) + text(1000 + n, turn)) for turn in range(4)]
        assert len(set(turns)) == 1
        homes[turns[0]] += 1
    assert min(homes.values()) > 30


def test_a_second_gateway_sends_it_to_the_same() -> None:
    ours, theirs = Sending("a", "b", "c", "d"), Sending("d", "b", "a", "c")
    assert all(ours.send(text(n, 2)) == theirs.send(text(n, 2)) for n in range(50))


def test_nobody_waits_for_its_instance_while_another_is_free() -> None:
    sending = Sending("a", "b", "c", "d", running=1)
    homes = [sending.send(text(1, 2), ends=False) for _ in range(4)]
    assert sorted(homes) == ["a", "b", "c", "d"]


def test_the_second_of_its_place_takes_over_before_any_other() -> None:
    sending = Sending("a", "b", "c", "d", running=100)
    homes = [sending.send(text(1, 2), ends=False) for _ in range(3)]
    assert homes[0] == homes[1] != homes[2], "it has more to do, but not by more than this"


def test_what_belongs_with_none_yet_is_sent_as_if_nothing_belonged_together() -> None:
    sending, plain = Sending("a", "b", "c", "d", running=100), Sending("a", "b", "c", "d", running=100, choices=0)
    loads: dict[Sending, Counter[str]] = {sending: Counter(), plain: Counter()}
    for n in range(400):
        for one, homes in loads.items():
            homes[one.send(text(n, 2 + n % 7), ends=False)] += 2 + n % 7
    assert max(loads[sending].values()) <= 1.03 * max(loads[plain].values())


def test_beyond_the_imbalance_any_other_takes_it() -> None:
    sending = Sending("a", "b", "c", "d", running=100)
    homes = Counter(sending.send(text(1, 2), ends=False) for _ in range(40))
    assert len(homes) == 4
    assert max(homes.values()) <= 1.5 * 10 + 2
    steady = Sending("a", "b", "c", "d", running=100, choices=1, imbalance=1e9)
    assert len({steady.send(text(1, 2), ends=False) for _ in range(40)}) == 1


def test_without_choices_it_is_the_least_loaded() -> None:
    sending = Sending("a", "b", "c", "d", choices=0)
    assert {sending.send(text(n, 2)) for n in range(20)} == {"a"}


def test_what_all_share_spreads_over_all_once_instances_say_so() -> None:
    system = text(0, 4)
    sending = Sending("a", "b", "c", "d")
    assert len({sending.send(system + text(n, 1)) for n in range(1, 40)}) == 1
    beginnings = counted(*(system + text(n, 1) for n in range(1, 40)))
    for now_s in (0.0, 1.0):
        sending.router.reported(report_of("a", beginnings, busy_s=now_s), now_s=now_s)
    homes = Counter(sending.send(system + text(n, 1)) for n in range(1, 200))
    assert min(homes.values()) > 25


def test_an_instance_that_failed_it_is_not_its_place() -> None:
    sending = Sending("a", "b", "c", "d")
    home = sending.send(text(1, 2))
    one = prompt("again", text(1, 2))
    one.avoid.add(home)
    sending.router.enqueue(one, deadline_s=10.0, retry_after_s=1.0)
    (sent,) = sending.router.dispatch("m", now_s=0.0).assignments
    assert sent.route.instance_id != home


def test_a_conversation_is_decoded_where_it_was_unless_that_has_much_more_to_do() -> None:
    router = Router(max_queued_requests=1000, affinity=AffinityPolicy(secret=b"s"))
    routes = [
        route("p", running=100, queued_tokens=10**6, role="prefill"),
        *(route(name, running=100, role="decode") for name in "abc"),
    ]
    router.set_routes("m", "", routes)

    def sent(name: str, token_ids: Sequence[int], *, avoid: str = "") -> str:
        one = prompt(name, token_ids)
        one.avoid.update(avoid)
        router.enqueue(one, deadline_s=10.0, retry_after_s=1.0)
        (assignment,) = router.dispatch("m", now_s=0.0).assignments
        assert assignment.decode is not None
        return assignment.decode.instance_id

    assert [sent(f"r{n}", text(n, 2)) for n in range(3)] == ["a", "b", "c"]
    router.finish("r0", "m")
    assert sent("r1-again", text(1, 2)) == "b", "a has less to do, by less than it is worth"
    assert sent("r1-avoids", text(1, 2), avoid="b") == "a"
    homes = [sent(f"many{n}", text(7, 2)) for n in range(30)]
    assert set(homes) == set("abc"), "one alone has too much to do"
    assert sum(here == after for here, after in itertools.pairwise(homes)) > 15


def test_the_load_that_is_counted_is_that_of_the_bookings() -> None:
    draw = random.Random(3)
    sending = Sending("a", "b", "c", "d", running=100)
    open_: list[str] = []
    for _ in range(300):
        sending.send(text(draw.randrange(9), 2), ends=False)
        open_.append(f"r{sending.num - 1}")
        if draw.random() < 0.7:
            sending.router.finish(open_.pop(draw.randrange(len(open_))), "m")
        if draw.random() < 0.1:
            names = draw.sample("abcdef", 4)
            sending.router.set_routes("m", "", [route(name, running=100) for name in names])
    sending.send(text(99, 2))
    assert len(sending.router._homes) == 10
    queue = sending.router._queues["m"]
    assert queue.total_outstanding == sum(queue.outstanding.values())
