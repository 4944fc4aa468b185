from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.fake_gateway import FakeGateway, fake_gateway


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with fake_gateway() as made:
        monkeypatch.setenv("BLITZ_URL", made.url)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("BLITZ_ADMIN_KEY", raising=False)
        yield made
