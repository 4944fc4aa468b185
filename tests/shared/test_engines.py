"""What is known of engines by their names."""

from __future__ import annotations

import msgspec
import pytest

from shared.engine_args import EngineArgs
from shared.engines import LAYERED, OTHERS, check_engine, traits_of
from shared.errors import BadRequest
from tests.records import model, worker


def test_a_model_that_names_none_has_an_engine_of_ours() -> None:
    assert traits_of("") is LAYERED
    assert (LAYERED.lends_layers, LAYERED.moves_kv) == (True, True)


def test_one_that_only_a_newer_process_knows_does_nothing_but_serve() -> None:
    traits = traits_of("newer")
    assert (traits.lends_layers, traits.moves_kv) == (False, False)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    for known in ("", *OTHERS):
        check_engine(known)
    with pytest.raises(BadRequest, match=r"'sglang' .*, but vllm") as refused:
        check_engine("sglang")
    assert refused.value.param == "engine"
    with pytest.raises(BadRequest) as refused:
        check_engine("x" * 10_000)
    assert len(refused.value.message) < 300


def test_a_worker_holds_what_fits_and_whose_engine_it_has() -> None:
    ours, theirs = model("m", weights_bytes=100), model("v", weights_bytes=100, engine="vllm")
    plain, offers = worker("w0", arena_bytes=100), worker("w1", arena_bytes=100, engines=("vllm",))
    assert [w.can_hold(m) for w in (plain, offers) for m in (ours, theirs)] == [True, False, True, True]
    assert not worker("w2", arena_bytes=99, engines=("vllm",)).can_hold(theirs)


def test_what_computes_an_instance_is_its_models_engine_or_the_workers_own() -> None:
    offers = worker("w", engine="torch", engines=("vllm",))
    assert [offers.engine_of(model("m", engine=engine)) for engine in ("", "vllm")] == ["torch", "vllm"]


def test_arguments_are_those_that_are_set_and_false_is_one() -> None:
    args = EngineArgs(max_model_len=4096, enforce_eager=False, kv_cache_gib=0.5)
    assert args.as_mapping() == {"max_model_len": 4096, "kv_cache_gib": 0.5, "enforce_eager": False}
    assert msgspec.json.decode(msgspec.json.encode(args), type=EngineArgs) == args
