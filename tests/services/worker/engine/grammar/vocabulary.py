"""A small byte-level vocabulary, and random walks through a grammar."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.worker.engine.grammar.compiler import GrammarCompiler, Mask
from services.worker.engine.grammar.matcher import GrammarMatcher
from shared.messages.generation import Grammar

VOCAB_SIZE = 1037
"""Of the logits: more than the tokenizer has, and no multiple of 32."""
END, ALSO_END = 1, 2


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """About 1,000 tokens: every byte, and pieces of JSON."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = [
        "name",
        "value",
        "kind",
        "items",
        "red",
        "green",
        "2024-01-31",
        "true",
        "false",
        "null",
        "été",
        "\U0001f600",
    ]
    draw = random.Random(0)
    lines = [
        f'{{"{draw.choice(names)}{i % 7}": "{draw.choice(names)}", "n": [{i * 37}, -{i}.5e3]}}' for i in range(900)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    return made


@lru_cache(maxsize=1)
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str().encode(), vocab_size=VOCAB_SIZE, end_ids=(END, ALSO_END))


def matcher_of(kind: str, text: str) -> GrammarMatcher:
    return GrammarMatcher(compiler().compile(Grammar(kind=kind, text=text)))  # type: ignore[arg-type]


def new_mask() -> Mask:
    return np.full((VOCAB_SIZE + 31) // 32, -1, np.int32)


def allowed(matcher: GrammarMatcher) -> list[int]:
    """The ids that its mask has."""
    out = new_mask()
    matcher.mask(out)
    ids: list[int] = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist()
    return ids


def encoded(text: str) -> list[int]:
    """Byte by byte: which tokens a text is written with is the model's choice."""
    table = {value: i for i, value in enumerate(_bytes()) if len(value) == 1}
    return [table[text.encode()[i : i + 1]] for i in range(len(text.encode()))]


def text_of(token_ids: list[int]) -> str:
    return b"".join(_bytes()[i] for i in token_ids).decode()


@lru_cache(maxsize=1)
def _bytes() -> list[bytes]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)})
    tokens = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    return [b"" if i < 3 else bytes(table[c] for c in token) for token, i in tokens]


_CLOSING = frozenset(b'"}]')


def walk(matcher: GrammarMatcher, draw: random.Random, *, max_tokens: int = 2000) -> tuple[list[int], bool]:
    """Random allowed tokens, those that close something rather than others; and whether the answer ended by itself."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        if matcher.is_complete:
            return token_ids, True
        ids = allowed(matcher)
        if matcher.may_end and draw.random() < 0.3:
            matcher.accept(END)
            return token_ids, True
        ids = [i for i in ids if i not in (END, ALSO_END)]
        closing = [i for i in ids if _bytes()[i][:1] and _bytes()[i][0] in _CLOSING]
        commas = [i for i in ids if _bytes()[i] == b","]
        few = [some for some, odds in ((closing, 0.4), (commas, 0.2)) if some and draw.random() < odds]
        token_id = draw.choice(few[0] if few else ids)
        matcher.accept(token_id)
        token_ids.append(token_id)
    return token_ids, matcher.is_complete
