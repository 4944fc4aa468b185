"""What ``blitzscale up`` prints once it serves."""

from __future__ import annotations

from shared.messages.admin import Status


def summary(url: str, status: Status, *, others: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Where it is, what it serves, and two ways to try it, ready to paste. ``others``: where the other gateways are."""
    names = [model.name for model in status.models]
    model = names[0] if names else "MODEL"
    return (
        "",
        f"  BlitzScale serves at {url}  ({len(status.workers)} workers)",
        *((f"  and at {', '.join(others)}",) if others else ()),
        f"  models: {', '.join(names) or 'none yet: blitzscale models add MODEL_DIR'}",
        "",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}\'',
        "",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}/v1", api_key="none")',
        '  messages = [{"role": "user", "content": "Hello"}]',
        f'  stream = client.chat.completions.create(model="{model}", messages=messages, max_tokens=32, stream=True)',
        "  for chunk in stream:",
        '      print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "",
        f"  blitzscale scale {model} 2 --url {url}      more instances now",
        f"  blitzscale status --url {url}        what runs;  Ctrl-C here stops everything",
        "",
    )
