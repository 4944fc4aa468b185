"""Keys for administration from a file that is replaced while the gateway runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway import watched_file
from services.gateway.admin_keys import AdminKeys, read_admin_keys
from services.gateway.config import GatewayConfig
from shared.settings import SettingsError
from tests.mounted import Mounted
from tests.services.gateway.conftest import Stack, StackFactory


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "the file is empty"), (b"# none yet\n\n  # soon\n", "holds no key"), (b"admin-key\xff", "it is not text")],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"BLITZ_ADMIN_KEYS_FILE=.*{problem}") as caught:
        AdminKeys((), str(file))
    assert "admin-key" not in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"BLITZ_ADMIN_KEYS_FILE=.*cannot be read: No such file"):
        AdminKeys((), str(tmp_path / "none"))


def test_each_line_is_a_key_but_for_remarks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of this month\r\nfirst\r\n\n  second key \n#third\n")
    assert read_admin_keys(str(file)) == ("first", "second key")


def test_keys_come_from_the_variable_or_from_a_file() -> None:
    config = GatewayConfig.from_env({"BLITZ_ADMIN_KEYS_FILE": "/run/keys/admin"})
    assert (config.admin_keys, config.admin_keys_file) == ((), "/run/keys/admin")
    with pytest.raises(SettingsError, match="BLITZ_ADMIN_KEYS and BLITZ_ADMIN_KEYS_FILE are both set"):
        GatewayConfig.from_env({"BLITZ_ADMIN_KEYS_FILE": "/run/keys/admin", "BLITZ_ADMIN_KEYS": "root"})


async def status(stack: Stack, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return (await stack.http.get("/admin/status", headers=headers)).status_code


async def test_keys_that_are_replaced_in_the_file_are_replaced_in_the_gateway(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    secret = Mounted(tmp_path / "secret")
    secret.put(keys="old\nboth\n")
    stack = await make_stack(admin_keys_file=str(secret / "keys"))
    assert [await status(stack, key) for key in ("old", "both", "new", "")] == [200, 200, 401, 401]
    secret.put(keys="new\nboth\n")

    async def is_new() -> bool:
        return await status(stack, "new") == 200

    # The gateway looks by itself.
    await stack.until(is_new)
    assert [await status(stack, key) for key in ("old", "both", "new", "")] == [401, 200, 200, 401]


async def test_administration_is_never_open_because_the_file_is_empty_or_gone(
    make_stack: StackFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "LOOK_EVERY_S", 3600.0)  # or ours would see nothing new, and not wait
    file = tmp_path / "keys"
    file.write_text("root")
    stack = await make_stack(admin_keys_file=str(file))
    for change in (lambda: file.write_text(""), lambda: file.write_text("# none"), file.unlink):
        change()
        await stack.gateway.admin_keys.look()
        assert [await status(stack, key) for key in ("root", "")] == [200, 401]


async def test_a_file_that_could_not_be_read_is_read_again_though_it_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when this process had too many files open."""
    monkeypatch.setattr(watched_file, "AGAIN_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = AdminKeys((), str(file))
    file.write_text("newer\n")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        await keys.look()
        await keys.look()
    assert len([r for r in caplog.records if "Too many open files" in r.getMessage()]) == 1
    assert keys.accept(b"old")
    await keys.look()
    assert keys.accept(b"newer")
    assert not keys.accept(b"old")
