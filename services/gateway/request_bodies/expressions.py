"""How large expressions become when their repetitions are written out.

An automaton is made while it is used, and looks ahead as far as only one text may follow: ``a{100000}`` compiles in a
millisecond, and its first mask takes more than ten seconds. No limit of llguidance's stops that, so it is counted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

MAX_EXPRESSION_SIZE = 4096
"""Characters, classes and escapes of one expression. Of one text of that length a mask takes up to 10 ms at first."""
MAX_LARK_BYTES = 16 * 1024
MAX_LARK_DEFINITIONS = 256
"""The library's parser calls itself for each rule of a chain: a few thousand take more stack than there is."""

_MANY = 10**9
# Possessive, and none passes where another may begin: each character is looked at a few times at most.
_REPEATED = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?+\}")
_VERBOSE = re.compile(r"\(\?[a-zA-Z-]*x")
_BRACED_ESCAPE = re.compile(r"\\[pPxuU]\{[^{}]*+\}")
_LARK = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<expression>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<repeated>\{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?+\}|~\s*+\d++(?:\s*+\.\.\s*+\d++)?+)
    |(?P<directive>%[a-z]+)
    |(?P<special><[^<>\s]+>)
    |(?P<name>[!?_]*[A-Za-z][A-Za-z0-9_-]*)
    |(?P<params>::)
    |(?P<colon>:)
    |(?P<other>[\s\S])""",
    re.VERBOSE,
)
_DIRECTIVES = ("%ignore", "%import")


def check_expression(text: str) -> None:
    """Raises ``ValueError`` for one that is too large."""
    if _VERBOSE.search(text):
        raise ValueError("the flag x is not supported")
    size = _size(text)
    if size > MAX_EXPRESSION_SIZE:
        raise ValueError(
            f"with its repetitions written out it has {size} characters; at most {MAX_EXPRESSION_SIZE} are allowed"
        )


def _size(text: str) -> int:
    """What is not balanced is refused by what compiles it."""
    totals, last, at = [0], 0, 0
    while at < len(text):
        character = text[at]
        repeated = _REPEATED.match(text, at) if character == "{" else None
        if repeated is not None:
            totals[-1] = min(totals[-1] + last * (_times(repeated) - 1), _MANY)
            last = min(last * _times(repeated), _MANY)
            at = repeated.end()
            continue
        if character == "(":
            totals.append(0)
            at += 1
            continue
        if character == ")":
            last = max(totals.pop(), 1)
            totals = totals or [0]
        else:
            last = 1
        totals[-1] += last
        at = _behind(text, at)
    return sum(totals)


def _times(repeated: re.Match[str]) -> int:
    # Numbers of thousands of digits are not made.
    digits = repeated[2] or repeated[1] or "1"
    return max(int(digits[:9]), 1) if len(digits) <= 9 else _MANY


def _behind(text: str, at: int) -> int:
    """The end of the atom that begins there: a character, an escape, a class with those inside of it."""
    if text[at] == "\\":
        braced = _BRACED_ESCAPE.match(text, at)
        return braced.end() if braced is not None else at + 2
    if text[at] != "[":
        return at + 1
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text[at] == "[":
            depth += 1
            at += 2 if text[at + 1 : at + 2] == "^" else 1
            # A bracket that comes first is one of the characters.
            at += text[at : at + 1] == "]"
            continue
        depth -= text[at] == "]"
        at += 1
        if depth == 0:
            break
    return at


def check_lark(text: str) -> None:
    """Raises ``ValueError`` for a grammar that is too large, or has what is not supported."""
    size_bytes = len(text.encode(errors="surrogatepass"))
    if size_bytes > MAX_LARK_BYTES:
        raise ValueError(f"it has {size_bytes} bytes; at most {MAX_LARK_BYTES} are allowed")
    sizes = _TerminalSizes(dict(_definitions(text)))
    largest = max(map(sizes.of, sizes.names), default=0)
    if largest > MAX_EXPRESSION_SIZE:
        raise ValueError(
            f"with its repetitions written out a terminal has {largest} characters; "
            f"at most {MAX_EXPRESSION_SIZE} are allowed"
        )


Tokens = list[tuple[str, str]]


def _definitions(text: str) -> Iterator[tuple[str, Tokens]]:
    """Names and what they stand for, those of terminals and rules alike."""
    tokens = [(match.lastgroup or "", match[0]) for match in _LARK.finditer(text)]
    tokens = [(kind, value) for kind, value in tokens if kind != "comment" and value not in " \t\r"]
    for kind, value in tokens:
        if kind == "directive" and value not in _DIRECTIVES:
            raise ValueError(f"{value} is not supported ({' and '.join(_DIRECTIVES)} are)")
        if kind == "special":
            raise ValueError(f"tokens by name or id ({value[:80]}) are not supported")
        if kind == "other" and value in "&~":
            # What is in two expressions, or not in one, may take as many states as there are sets of theirs.
            raise ValueError(f"{value} is not supported")
        if kind == "expression":
            body, _, flags = value[1:].rpartition("/")
            if "x" in flags:
                raise ValueError("the flag x is not supported")
            check_expression(body)
        if (kind, value) == ("name", "temperature"):
            raise ValueError("temperature is not supported")
    colons, names = [], []
    first = ""
    for i, (kind, value) in enumerate(tokens):
        if kind == "colon":
            # Between a name and its colon may be a priority, attributes or a parameter: the line's first name it is.
            colons.append(i)
            names.append(first)
        elif value == "\n":
            first = ""
        elif kind == "name":
            first = first or value
    if len(colons) > MAX_LARK_DEFINITIONS:
        raise ValueError(f"it has {len(colons)} definitions; at most {MAX_LARK_DEFINITIONS} are allowed")
    for number, (colon, end) in enumerate(pairwise([*colons, len(tokens)])):
        yield f"{names[number]} {number}", tokens[colon + 1 : end]


class _TerminalSizes:
    """Of terminals, which are expressions made of others. Repetitions in rules cost items, and those are limited."""

    def __init__(self, definitions: dict[str, Tokens]) -> None:
        bodies = {name.partition(" ")[0]: body for name, body in definitions.items()}
        self._bodies = {name: body for name, body in bodies.items() if name.lstrip("_!?")[:1].isupper()}
        self.names = tuple(self._bodies)
        self._known: dict[str, int] = {}

    def of(self, name: str) -> int:
        """At most so many characters; a terminal of which it is part counts as nothing, and is refused later."""
        if name in self._known:
            return self._known[name]
        self._known[name] = 0
        size, times = 0, 1
        for kind, value in self._bodies.get(name, ()):
            if kind in ("text", "expression"):
                size += _size(value[1:]) if kind == "expression" else len(value)
            elif kind == "repeated":
                times = min(times * _largest(value), _MANY)
            elif kind == "name" and value in self._bodies:
                size += self.of(value)
        self._known[name] = min(size * times, _MANY)
        return self._known[name]


def _largest(repeated: str) -> int:
    return max((int(digits[:9]) if len(digits) <= 9 else _MANY for digits in re.findall(r"\d+", repeated)), default=1)
