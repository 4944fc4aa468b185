"""Detokenisation and stop strings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.gateway.core.text_output import Detokenizer, StopScanner, TextOutput, WindowDetokenizer
from services.gateway.tokenizer import ModelTokenizer, load_tokenizer
from tests.services.gateway.checkpoint import BOS, EOS, VOCAB_SIZE, byte_tokenizer, files_in, write_checkpoint

TEXTS = [
    "plain",
    "héllo wörld",
    "日本語テキスト",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "a\u0301\u0302 \u200d",
    " lead and trail ",
    "\n\n\t x",
]


def run(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_deltas_add_up_and_never_hold_half_a_character(text: str) -> None:
    tokenizer = ModelTokenizer(byte_tokenizer(), None)
    deltas = run(
        tokenizer.detokenizer(skip_special_tokens=True), tokenizer.encode_all([text], add_special_tokens=True)[0]
    )
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)


@given(st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=40), st.booleans())
def test_any_ids_decode_to_what_the_tokenizer_says(ids: list[int], skip: bool) -> None:
    tokenizer = ModelTokenizer(byte_tokenizer(), None)
    deltas = run(tokenizer.detokenizer(skip_special_tokens=skip), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def sentencepiece_like() -> Tokenizer:
    """Metaspace words with byte fallback, as Llama 2 and Mistral have it."""
    words = ["<unk>", "▁the", "▁fox", "▁", "x", "ing", "▁Ü", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_sentencepiece_deltas_add_up_too() -> None:
    tokenizer = ModelTokenizer(sentencepiece_like(), None)
    draw = random.Random(1)
    pieces = [[1], [2], [3], [4], [5], [6], [7 + b for b in "😀".encode()], [7 + b for b in "é".encode()]]
    for _ in range(200):
        ids = [i for _ in range(draw.randint(1, 12)) for i in draw.choice(pieces)]
        deltas = run(tokenizer.detokenizer(skip_special_tokens=True), ids)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)
        assert "\ufffd" not in "".join(deltas)


def test_bytes_that_stay_invalid_are_not_held_back_for_ever() -> None:
    tokenizer = ModelTokenizer(sentencepiece_like(), None)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert any(detokenizer.push(7 + 0x80) for _ in range(10))


@pytest.mark.parametrize(("token_id", "skip"), [(263, True), (264, True), (264, False)])
def test_tokens_that_print_nothing_cost_the_same_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch, token_id: int, skip: bool
) -> None:
    base = sentencepiece_like()
    base.add_special_tokens([AddedToken("<pad>", special=True)])
    assert base.token_to_id("<pad>") == 263
    assert base.id_to_token(264) is None
    tokenizer = ModelTokenizer(base, None)
    lengths: list[int] = []
    decode = ModelTokenizer.decode

    def counted(self: ModelTokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        lengths.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(ModelTokenizer, "decode", counted)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas = run(detokenizer, [1, *[token_id] * 16_000, 7 + 0xC3, 7 + 0xA9, 2])
    assert "".join(deltas) == "the\xe9 fox"
    assert max(lengths) <= 64
    assert len(lengths) <= 2 * 16_000 + 20


def test_a_hidden_token_inside_a_character_does_not_break_it() -> None:
    base = sentencepiece_like()
    base.add_special_tokens([AddedToken("<pad>", special=True)])
    detokenizer = ModelTokenizer(base, None).detokenizer(skip_special_tokens=True)
    assert "".join(run(detokenizer, [1, 7 + 0xC3, *[263] * 100, 7 + 0xA9])) == "the\xe9"


def scan(scanner: StopScanner, deltas: list[str]) -> tuple[str, bool]:
    shown = ""
    for delta in deltas:
        shown += scanner.push(delta)
        if scanner.stopped:
            return shown, True
    return shown + scanner.flush(), False


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_the_earliest_stop_string_ends_the_text_however_it_is_cut(text: str, stops: list[str], size: int) -> None:
    deltas = [text[i : i + size] for i in range(0, len(text), size)]
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    shown, stopped = scan(StopScanner(tuple(stops), include=False), deltas)
    assert stopped == bool(found)
    # Cut into pieces, a stop string that ends first is seen first; its start is what counts.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if size == 1 and ends:
        first_end = min(ends)[0]
        assert shown == text[: min(start for end, start in ends if end == first_end)]
    elif not found:
        assert shown == text


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(("STOP",), include=False)
    assert scanner.push("one S") == "one "
    assert scanner.push("T") == ""
    assert scanner.push("ILL") == "STILL"


def output(**settings: object) -> TextOutput:
    tokenizer = ModelTokenizer(byte_tokenizer(), None)
    arguments = {"scanner": None, "hidden_ids": frozenset(), "min_tokens": 0, **settings}
    return TextOutput(tokenizer.detokenizer(skip_special_tokens=True), **arguments)  # type: ignore[arg-type]


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    text = output(scanner=StopScanner(("b",), include=False), min_tokens=3)
    assert [text.push(i) for i in b"abab"] == ["a", "b", "a", ""]
    assert text.stopped


def test_hidden_tokens_count_without_text() -> None:
    text = output(hidden_ids=frozenset({ord("b"), EOS}))
    assert [text.push(i) for i in (*b"ab", EOS)] == ["a", "", ""]
    assert text.num_tokens == 3


def test_loading_reads_template_and_special_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tokenizer = load_tokenizer(folder, files_in(folder))
    assert tokenizer.template is not None
    text = tokenizer.template.render([{"role": "user", "content": "x"}])
    assert text == "<s><|user|>x<|end|><|assistant|>"
    assert tokenizer.encode_all([text], add_special_tokens=False)[0][0] == BOS
