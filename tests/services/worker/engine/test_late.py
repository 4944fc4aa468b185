"""An engine that computes later gives what the other one gives, and tells who did not wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.scheduling.blocks import BlockPool
from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, Landed, combined
from services.worker.device.late import LateStreams, LateTiming
from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import RowOf, Slice
from services.worker.engine.late.failures import InjectedFailure, LateFailures
from services.worker.engine.late.late_engine import LateEngine, LateFault
from services.worker.engine.mock.mock_engine import MockEngine
from shared.errors import BadRequest
from tests.services.worker.device.waiting import held, settled, wait
from tests.services.worker.engine.batches import GREEDY, forward, slice_of
from tests.services.worker.engine.harness import DrivenSequence, loaded_engine
from tests.services.worker.engine.late_engines import late, waiting
from tests.services.worker.engine.loops import expected, make_loop, request, run_all
from tests.services.worker.engine.movers import batch_of, maker, mock_engine, sequences_of

LENGTHS = (20, 7, 33)
ORDERS = ("copies_first", "copies_last", "drawn")

MakeStreams = Callable[..., LateStreams]


@pytest.fixture
def streams_of() -> Iterator[MakeStreams]:
    made: list[LateStreams] = []

    def make(**timing: Any) -> LateStreams:
        made.append(LateStreams(LateTiming(**timing)))
        return made[-1]

    yield make
    for streams in made:
        streams.close()


@pytest.fixture
def streams(streams_of: MakeStreams) -> LateStreams:
    return streams_of()


def ints(buffer: Any) -> bytes:
    return np.frombuffer(buffer, dtype=np.uint8).tobytes()


def story(engine: Engine) -> list[object]:
    """Prompts layer by layer, their KV exported while later layers run; steps behind steps that are not waited for; KV
    that moves to other blocks, by layer, beside steps of the others; half a batch that goes on elsewhere. Each call is
    waited for before the next that depends on it. What it all gives."""
    given: list[object] = []
    layers, sequences = engine.num_layers, sequences_of(engine, LENGTHS)
    tables, ends = [s.blocks for s in sequences], list(LENGTHS)

    activation = engine.embed(batch_of(sequences))
    copies: list[Completion[Any]] = []
    for layer in range(layers):
        wait(engine.run_layers(activation, layer, layer + 1))
        copies.append(engine.export_kv(tables, ends, layer + 1, first_layer=layer))
        if layer == 1:
            given.append(ints(wait(engine.hidden_states(activation))))
    first = wait(engine.sample(activation))
    by_layer = [wait(copy) for copy in copies]
    given += [[token.token_id for token in first], [ints(kv) for kv in by_layer]]

    # Three steps at once, each behind the rows of the one before.
    steps = []
    for step in range(3):
        slices = [
            Slice(
                s.sequence_id,
                (first[i].token_id if not step else 0,),
                end + step,
                s.blocks,
                GREEDY,
                RowOf(step, i) if step else None,
            )
            for i, (s, end) in enumerate(zip(sequences, LENGTHS, strict=True))
        ]
        begun = engine.embed(forward(*slices, number=step + 1))
        steps += [engine.run_layers(begun, 0, layers), engine.sample(begun)]
    given.append([[token.token_id for token in wait(step)] for step in steps[1::2]])

    # The last prompt moves to other blocks, layer by layer, while the first goes on.
    moved = DrivenSequence(9, sequences[2].tokens, range(40, 44))
    kv = wait(engine.export_kv([tables[2]], [33], layers))
    by_layer = np.split(np.frombuffer(kv, dtype=np.uint8), layers)
    imports = [
        engine.import_kv([moved.blocks], [33], layer + 1, part, first_layer=layer)
        for layer, part in enumerate(by_layer)
    ]
    beside = engine.embed(forward(slice_of(0, [5], 23, sequences[0].blocks), number=5))
    beside_ran = engine.run_layers(beside, 0, layers)
    wait(combined(*imports))
    here = engine.embed(forward(slice_of(9, [first[2].token_id], 33, moved.blocks), number=6))
    ran, sampled = engine.run_layers(here, 0, layers), engine.sample(here)
    given += [[token.token_id for token in wait(sampled)], ints(wait(engine.export_kv([moved.blocks], [34], layers)))]
    wait(combined(ran, beside_ran))

    # Half a batch in parts; the other half where its hidden states and its KV come to.
    half = sequences_of(engine, (18,))[0]
    half.blocks = (50, 51, 52)
    begun = engine.embed(batch_of([half]))
    for layer in range(2):
        parts = [engine.run_part(begun, layer, 0, 10), engine.run_part(begun, layer, 10, 18)]
        wait(combined(*parts))
    hidden, kv = engine.hidden_states(begun), engine.export_kv([half.blocks], [18], 2)
    taken = DrivenSequence(8, half.tokens, (55, 54))
    rest = engine.resume(batch_of([taken]), np.array(wait(hidden)), next_layer=2)
    wait(rest)
    brought = engine.import_kv([taken.blocks], [18], 2, wait(kv))
    ran, sampled = engine.run_layers(rest, 2, layers), engine.sample(rest)
    wait(combined(ran, brought))
    given += [[token.token_id for token in wait(sampled)], ints(wait(engine.export_kv([taken.blocks], [18], layers)))]
    return given


@pytest.fixture(scope="module")
def plain() -> dict[str, list[object]]:
    return {kind: story(maker(kind)()) for kind in ("llama", "mock")}


@pytest.mark.parametrize("kind", ["llama", "mock"])
@pytest.mark.parametrize("order", ORDERS)
def test_in_every_order_it_gives_what_the_engine_gives_at_once(
    kind: str, order: str, streams_of: MakeStreams, plain: dict[str, list[object]]
) -> None:
    for seed, delay_s in ((1, 0.0), (2, 0.0), (3, 0.001), (4, 0.002)):
        engine = late(maker(kind)(), streams_of(order=order, seed=seed, delay_s=delay_s))
        assert story(engine) == plain[kind]
        assert engine.num_faults == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_that_waits_for_each_call_goes_on_as_ever(order: str, streams_of: MakeStreams) -> None:
    """Chunks, preemption and blocks that are given again: each call is done before its blocks are freed."""
    engine = late(MockEngine(num_blocks=16, block_size=4, verify=True), streams_of(order=order))
    loop = make_loop(waiting(engine), prefill_chunk_tokens=3)
    engine.watch(loop.scheduler.pool)
    prompts = {f"r{i}": tuple(range(i + 1, 2 * i + 6)) for i in range(8)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt, max_tokens=9))
    tokens, _ = run_all(loop)
    assert tokens == {name: expected(prompt, 9) for name, prompt in prompts.items()}
    assert loop.scheduler.load().preemptions_total > 0
    assert engine.num_faults == 0


# --- what the caller did wrong --------------------------------------------------------------------


def begun(engine: LateEngine, blocks: Any = (1, 2), tokens: int = 20) -> Activation:
    """A prompt, of which nothing has run."""
    return settled(engine.embed(batch_of([DrivenSequence(1, range(1, tokens + 1), blocks)])))


def prompt_ran(engine: LateEngine, blocks: Any = (1, 2), tokens: int = 20) -> Activation:
    """A prompt, of which all layers have run."""
    activation = begun(engine, blocks, tokens)
    wait(engine.run_layers(activation, 0, engine.num_layers))
    return activation


def fault(completion: Completion[Any], match: str) -> None:
    with pytest.raises(LateFault, match=match):
        wait(completion)


@pytest.fixture(params=["llama", "mock"])
def engine(request: pytest.FixtureRequest, streams: LateStreams) -> LateEngine:
    return late(maker(request.param)(), streams)


def test_a_block_table_that_grows_before_the_call_is_done(
    engine: LateEngine, streams: LateStreams, caplog: pytest.LogCaptureFixture
) -> None:
    table = [1, 2]
    with held(streams):
        embedded = engine.embed(forward(slice_of(1, range(20), 0, table)))
        ran = engine.run_layers(embedded, 0, 1)
        table.append(3)
    fault(embedded, "embed: the batch has changed since the call")
    fault(ran, "embed: the batch has changed")
    assert engine.num_faults == 1
    assert "the batch has changed since the call" in caplog.text


def test_a_batch_whose_table_changes_between_two_layers(engine: LateEngine) -> None:
    table = [1, 2]
    activation = begun(engine, table)
    engine_table = [3, 4]
    activation = settled(engine.embed(forward(slice_of(1, range(20), 0, engine_table))))
    wait(engine.run_layers(activation, 0, 1))
    engine_table[0] = 5
    fault(engine.run_layers(activation, 1, 2), "layers 1..2: the batch has changed")


def test_bytes_and_tables_that_change_before_the_copy_is_done(engine: LateEngine, streams: LateStreams) -> None:
    prompt_ran(engine)
    kv = np.array(wait(engine.export_kv([(1, 2)], [20], 4)))
    table, ends, tokens = [5, 6], [20], [1, 2, 3]
    with held(streams):
        imported = engine.import_kv([(3, 4)], [20], 4, kv)
        exported = engine.export_kv([table], [20], 0)
        shortened = engine.export_kv([(1, 2)], ends, 4)
        embedded = engine.embed_tokens(tokens)
        kv[7] ^= 1
        table[1] = 7
        ends[0] = 19
        tokens[0] = 9
    fault(imported, "import: the bytes have changed")
    fault(exported, "export: the positions have changed")
    fault(shortened, "export: the positions have changed")
    fault(embedded, "embed tokens: the tokens have changed")
    assert engine.num_faults == 4


def test_hidden_states_that_change_before_a_batch_is_resumed(engine: LateEngine, streams: LateStreams) -> None:
    batch = batch_of([DrivenSequence(1, range(20), (1, 2))])
    hidden = np.array(wait(engine.embed_tokens(range(20))))
    with held(streams):
        resumed = engine.resume(batch, hidden, next_layer=0)
        hidden[3] ^= 1
    fault(resumed, "resume: the bytes have changed")
    hidden[3] ^= 1
    resumed = settled(engine.resume(batch, hidden, next_layer=0))
    hidden[:] = 0  # they may be written once the engine has them: not the caller's any more
    wait(engine.run_layers(resumed, 0, 4))


class _Meanwhile(MockEngine):
    """Something is done while layers run."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        ran = super().run_layers(activation, first, last)
        self.meanwhile()
        return ran


@pytest.mark.parametrize("given_again", [False, True])
def test_a_block_that_is_freed_before_the_call_is_done(
    engine: LateEngine, streams: LateStreams, given_again: bool
) -> None:
    pool = BlockPool(engine.num_blocks, engine.block_size)
    engine.watch(pool)
    blocks, others = pool.allocate(2), pool.allocate(2)
    activation = prompt_ran(engine, tuple(blocks))
    prompt_ran(engine, tuple(others))
    kv = wait(engine.export_kv([others], [20], 4))
    step = engine.embed(forward(slice_of(1, [5], 20, tuple(blocks))))
    wait(step)
    with held(streams):
        calls = {
            "layers 0..4": engine.run_layers(step, 0, 4),
            "embed": engine.embed(forward(slice_of(1, [5], 20, tuple(blocks)))),
        }
        stale = engine.export_kv([blocks], [20], 4)
        beyond = engine.export_kv([blocks], [16], 4)
        sampled = engine.sample(activation)
        fine = engine.export_kv([others], [20], 4)
        pool.free(blocks[1:])
        if given_again:
            pool.append(blocks[:1])
    for what, completion in calls.items():
        fault(completion, f"{what}: a KV block was freed since the call")
    assert ints(wait(fine)) == ints(kv)
    assert len(wait(sampled)) == 1, "it reads no KV"
    wait(beyond)  # its positions are all in the block that stays
    assert set(ints(wait(stale))) == {0xFF}, "it harms nobody, and its caller throws it away"
    assert (engine.num_faults, engine.num_stale_reads) == (2, 1)


def test_a_block_that_is_freed_while_the_layers_run(streams: LateStreams) -> None:
    inner = _Meanwhile(num_blocks=16)
    engine, pool = late(inner, streams), BlockPool(16, 16)
    engine.watch(pool)
    blocks = pool.allocate(2)
    activation = begun(engine, tuple(blocks))
    inner.meanwhile = lambda: pool.free(blocks)  # type: ignore[method-assign]
    fault(engine.run_layers(activation, 0, 4), "a KV block was freed")


def test_what_is_not_done_cannot_be_read(engine: LateEngine, streams: LateStreams) -> None:
    with held(streams):
        activation = engine.embed(forward(slice_of(1, range(20), 0, (1, 2))))
        ran = engine.run_layers(activation, 0, 4)
        sampled, kv = engine.sample(activation), engine.embed_tokens([1, 2])
        for completion in (activation, ran, sampled, kv):
            assert not completion.done
            with pytest.raises(RuntimeError, match="not done"):
                completion.result()
    assert len(wait(sampled)) == 1
    assert engine.num_faults == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["llama", "mock"])
def test_whose_copies_do_not_wait_for_the_layers_is_told_in_every_order(
    order: str, kind: str, streams_of: MakeStreams
) -> None:
    streams = streams_of(order=order)
    engine = late(maker(kind)(), streams)
    activation = begun(engine)
    with held(streams):
        ran = engine.run_layers(activation, 0, 1)
        exported = engine.export_kv([(1, 2)], [20], 1)
        hidden = engine.hidden_states(activation)
    fault(exported, "export: KV of layers 0..1 in slot .* still to be written")
    fault(hidden, "hidden states: the batch is still computed")
    wait(ran)
    kv = wait(engine.export_kv([(1, 2)], [20], 1))
    with held(streams):
        fine = engine.export_kv([(1, 2)], [20], 1)
        engine.run_layers(activation, 1, 2)  # another layer than is read
    assert ints(wait(fine)) == ints(kv)
    assert engine.num_faults == 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["llama", "mock"])
def test_whose_layers_do_not_wait_for_the_import_is_told_in_every_order(
    order: str, kind: str, streams_of: MakeStreams
) -> None:
    streams = streams_of(order=order)
    engine = late(maker(kind)(), streams)
    prompt_ran(engine)
    kv = wait(engine.export_kv([(1, 2)], [20], 4))
    step = settled(engine.embed(forward(slice_of(2, [5], 20, (3, 4)))))
    with held(streams):
        imported = engine.import_kv([(3, 4)], [20], 4, kv)
        ran = engine.run_layers(step, 0, 4)
    wait(imported)
    fault(ran, "layers 0..4: KV of layers 0..4 in slot .* still to be written")
    assert engine.num_faults == 1


def test_an_import_that_does_not_wait_for_its_batch(engine: LateEngine, streams: LateStreams) -> None:
    activation = begun(engine)
    wait(engine.run_layers(activation, 0, 2))
    hidden, kv = wait(engine.hidden_states(activation)), wait(engine.export_kv([(1, 2)], [20], 2))
    taken = batch_of([DrivenSequence(2, range(1, 21), (3, 4))])
    with held(streams):
        engine.resume(taken, hidden, next_layer=2)
        imported = engine.import_kv([(3, 4)], [20], 2, kv)
    fault(imported, "import: KV of layers 0..2")


def test_hidden_states_of_a_batch_that_goes_on_before_they_are_read(streams_of: MakeStreams) -> None:
    streams = streams_of(order="copies_last")
    engine = late(loaded_engine("llama", num_blocks=8), streams)
    activation = begun(engine)
    with held(streams):
        hidden = engine.hidden_states(activation)
        ran = engine.run_layers(activation, 0, 1)
    fault(hidden, "hidden states: the batch has gone on since the call")
    wait(ran)


def test_kv_that_is_still_to_be_written_is_poison(streams: LateStreams) -> None:
    inner = loaded_engine("llama", num_blocks=8)
    engine = late(inner, streams)
    prompt_ran(engine, (1, 2))
    kv = wait(engine.export_kv([(1, 2)], [20], 4))

    def poisoned(layer: int) -> set[int]:
        pages = inner.cache.k[layer].flatten(0, 1), inner.cache.v[layer].flatten(0, 1)
        nan = [torch.isnan(page).flatten(1).all(1) for page in pages]
        assert torch.equal(*nan)
        return set(nan[0].nonzero().flatten().tolist())

    step = settled(engine.embed(forward(slice_of(1, [5], 20, (1, 2)))))
    with held(streams):
        engine.run_layers(step, 0, 1)
        imported = engine.import_kv(
            [(5,)], [6], 3, np.array(kv)[: 3 * 6 * engine.kv_bytes_per_token_layer], first_layer=0
        )
        assert [poisoned(layer) for layer in range(4)] == [
            {36, *range(80, 86)},
            set(range(80, 86)),
            set(range(80, 86)),
            set(),
        ]
    wait(imported)
    assert [poisoned(layer) for layer in range(4)] == [set()] * 4


def test_kv_that_a_copy_still_has_to_read_is_no_poison_where_a_batch_is_run_again(streams_of: MakeStreams) -> None:
    streams = streams_of(order="copies_first")
    engine = late(loaded_engine("llama", num_blocks=8), streams)
    prompt_ran(engine)
    kv = ints(wait(engine.export_kv([(1, 2)], [20], 4)))
    again = begun(engine)
    with held(streams):
        exported = engine.export_kv([(1, 2)], [20], 4)
        ran = engine.run_layers(again, 0, 4)
    assert ints(wait(exported)) == kv
    wait(ran)
    assert engine.num_faults == 0


def test_what_was_called_wrong_changes_nothing(engine: LateEngine) -> None:
    activation = prompt_ran(engine)
    kv = ints(wait(engine.export_kv([(1, 2)], [20], 4)))
    with pytest.raises(BadRequest, match=r"layers 1\.\.2"):
        wait(engine.run_layers(activation, 1, 2))
    with pytest.raises(BadRequest, match="layer 4"):
        wait(engine.run_part(activation, 4, 0, 5))
    with pytest.raises(BadRequest, match="has run all 4"):
        wait(engine.hidden_states(activation))
    assert ints(wait(engine.export_kv([(1, 2)], [20], 4))) == kv
    for wrong in (
        lambda: engine.embed(forward()),
        lambda: engine.embed(forward(slice_of(1, range(20), 0, (1,)))),
        lambda: engine.resume(forward(slice_of(1, [1], 0, (1,))), b"", next_layer=0),
        lambda: engine.resume(forward(slice_of(1, [1], 0, (1,))), b"", next_layer=4),
        lambda: engine.export_kv([(1,)], [20], 4),
        lambda: engine.export_kv([(1, 2)], [20], 5),
        lambda: engine.import_kv([(1, 2)], [20], 4, b"123"),
    ):
        with pytest.raises(BadRequest):
            wrong()
    assert engine.num_faults == 0


def test_a_batch_that_failed_to_begin_fails_what_is_asked_of_it(streams: LateStreams) -> None:
    for inner in (loaded_engine("llama", num_blocks=8), mock_engine()):
        plain, later = inner, late(inner, streams)
        missing = Slice(1, (0,), 0, (1,), GREEDY, RowOf(77, 0))
        embedded = later.embed(forward(missing))
        for completion in (embedded, later.run_layers(embedded, 0, 4), later.sample(embedded)):
            with pytest.raises(BadRequest, match="row 0 of step 77"):
                wait(completion)
        if isinstance(plain, MockEngine):  # of which embed itself fails where it runs
            failed = plain.embed(forward(missing))
            for completion in (
                plain.run_layers(failed, 0, 4),
                plain.run_part(failed, 0, 0, 1),
                plain.hidden_states(failed),
                plain.sample(failed),
            ):
                assert completion.error is failed.error is not None


# --- what goes wrong by itself --------------------------------------------------------------------


def fails(engine: LateEngine, steps: int) -> list[tuple[int, bool]]:
    """Which operations of so many steps fail, and which of the rows that are sampled."""
    found = []
    for number in range(steps):
        activation = engine.embed(forward(*[slice_of(i, [i + 1], 0, (i,)) for i in range(4)], number=number))
        for completion in (activation, engine.run_layers(activation, 0, engine.num_layers), engine.sample(activation)):
            made = settled(completion)
            rows = made.result() if isinstance(made.error or made.result(), list) else []
            found.append((made.error is not None, tuple(token.error is not None for token in rows)))
    return found


def test_rows_and_steps_fail_as_a_seed_draws(streams: LateStreams) -> None:
    def drawn(**failures: Any) -> list[Any]:
        engine = late(MockEngine(num_blocks=16), streams, LateFailures(**failures))
        found = fails(engine, 40)
        assert engine.num_faults == 0
        return found

    none = drawn()
    assert not any(failed or any(rows) for failed, rows in none)
    rows = drawn(seed=1, row_share=0.3)
    assert not any(failed for failed, _ in rows)
    assert 20 < sum(sum(of) for _, of in rows) < 80
    steps = drawn(seed=1, step_share=0.2)
    assert 10 < sum(failed for failed, _ in steps) < 70
    assert steps == drawn(seed=1, step_share=0.2) != drawn(seed=2, step_share=0.2)
    assert rows == drawn(seed=1, row_share=0.3) != drawn(seed=2, row_share=0.3)


def test_a_device_that_is_lost_fails_everything_from_then_on(streams: LateStreams) -> None:
    engine = late(MockEngine(num_blocks=16), streams, LateFailures(device_after=7))
    found = [failed for failed, _ in fails(engine, 4)]
    assert found == [False] * 7 + [True] * 5
    for completion in (engine.embed_tokens([1]), engine.export_kv([(1,)], [1], 1)):
        with pytest.raises(InjectedFailure, match="lost"):
            wait(completion)
    assert engine.num_faults == 0


def test_a_row_that_fails_has_an_error_and_no_token(streams: LateStreams) -> None:
    engine = late(MockEngine(num_blocks=16), streams, LateFailures(row_share=1.0))
    sampled: list[Sampled] = wait(engine.sample(prompt_ran(engine)))
    assert [(token.token_id, token.error.code) for token in sampled if token.error] == [(-1, "internal")]


class _Timed(MockEngine):
    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        super().run_layers(activation, first, last)
        return Landed(None, device_s=1.25)


def test_the_devices_seconds_are_those_of_the_operation_and_not_of_the_wait(streams: LateStreams) -> None:
    engine = late(_Timed(num_blocks=16), streams)
    activation = begun(engine)
    with held(streams):
        ran = engine.run_layers(activation, 0, 4)
        assert math.isclose(ran.device_s, 0.0)
    assert settled(ran).device_s == 1.25


def test_counts_and_sizes_are_the_inner_engines(streams: LateStreams) -> None:
    inner = loaded_engine("llama", num_blocks=8)
    engine = late(inner, streams)
    for name in ("num_layers", "num_blocks", "block_size", "hidden_bytes_per_token", "kv_bytes_per_token_layer"):
        assert getattr(engine, name) == getattr(inner, name)
    assert engine.prepared_blocks == inner.prepared_blocks
    engine.prepare(0, 2)
    counts = engine.counts_of([1, 2], [3])
    assert list(counts.ids) == [1, 2, 3]
    with pytest.raises(TypeError, match="no batch of a late engine"):
        engine.run_layers(inner.embed(forward(slice_of(1, [1], 0, (1,)))), 0, 1)
