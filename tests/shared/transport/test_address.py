"""What is no address is known before UCX sees it: UCX would end the process."""

from __future__ import annotations

import random

import pytest

from shared.errors import BadAddress
from shared.transport.ucx import UcxTransport
from shared.transport.ucx_worker import check, seal


def test_a_sealed_address_is_one() -> None:
    check(seal(b"a worker's address"))


def test_anything_else_is_none() -> None:
    dice = random.Random(0)
    sealed = seal(dice.randbytes(200))
    broken = [sealed[:at] for at in range(len(sealed))]
    broken += [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    broken += [sealed + b"x", seal(b""), b"\xff" * 300, dice.randbytes(220)]
    for address in broken:
        with pytest.raises(BadAddress):
            check(address)


@pytest.mark.ucx
@pytest.mark.parametrize("same_host", [True, False])
async def test_a_transport_that_is_given_no_address_says_so_and_goes_on(same_host: bool) -> None:
    one, other = UcxTransport(name="one"), UcxTransport(name="other")
    try:
        for address in (b"", b"\xff" * 300, other.address[:-1], other.address[:100]):
            with pytest.raises(BadAddress):
                await one.connect(address, same_host=same_host)
        assert (await one.connect(other.address, same_host=same_host)).alive
    finally:
        await one.close()
        await other.close()
