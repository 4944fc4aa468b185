"""One example of each kind of message, with every field filled: what golden bytes are made from.

``python -m tests.shared.messages.examples > tests/shared/messages/golden/messages.json`` keeps them as JSON, by tag:
later versions decode them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any

import msgspec
from msgspec import inspect

import shared.messages
from shared.messages.codec import Message, encode


def kinds() -> dict[str, type[Message]]:
    """Every message of the product by its tag; tests make more."""
    for module in pkgutil.iter_modules(shared.messages.__path__):
        importlib.import_module(f"shared.messages.{module.name}")
    found: dict[str, type[Message]] = {}
    waiting: list[type[Message]] = list(Message.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        tag = str(kind.__struct_config__.tag)
        if kind.__module__.startswith("shared.messages.") and tag != "never.v0":
            found[tag] = kind
    return dict(sorted(found.items()))


def example(kind: type[Message]) -> Message:
    """Values of the right types, none of them a default if that can be helped."""
    made = _value(inspect.type_info(kind), kind.__name__)
    return msgspec.convert(made, kind, strict=True)


def _value(found: inspect.Type, name: str) -> Any:
    match found:
        case inspect.Metadata():
            return _value(found.type, name)
        case inspect.StructType():
            fields = {f.encode_name: _value(f.type, f.name) for f in found.fields}
            return fields | ({found.tag_field: found.tag} if found.tag_field else {})
        case inspect.LiteralType():
            return found.values[-1]
        case inspect.UnionType():
            return _value(next(t for t in found.types if not isinstance(t, inspect.NoneType)), name)
        case inspect.VarTupleType() | inspect.ListType():
            return [_value(found.item_type, name)]
        case inspect.TupleType():
            return [_value(item, name) for item in found.item_types]
        case inspect.DictType():
            return {_value(found.key_type, name): _value(found.value_type, name)}
        case inspect.StrType():
            return name if found.pattern else f"a {name}"
        case inspect.BytesType():
            return name.encode().ljust(found.min_length or 0, b".")
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 1.5
        case inspect.BoolType():
            return True
        case _:
            raise TypeError(f"no example of {found}")


def main() -> int:
    examples = {tag: encode(example(kind)).hex() for tag, kind in kinds().items()}
    sys.stdout.write(json.dumps(examples, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
