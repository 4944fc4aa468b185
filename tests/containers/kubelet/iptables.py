"""A chain of rules of our own, which others jump to while it is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Chains:
    """``hooks``: the chains that jump to it, each perhaps with a condition: ``INPUT -s 10.0.0.0/8``."""

    def __init__(self, table: str, name: str, hooks: Sequence[str]) -> None:
        self._table, self._name, self._hooks = table, name, hooks
        self.close()
        self._run("-N", name)
        for hook in hooks:
            self._run("-I", *hook.split(), "-j", name)

    def write(self, rules: Sequence[str]) -> None:
        """All at once, in place of those before."""
        added = "".join(f"-A {self._name} {rule}\n" for rule in rules)
        text = f"*{self._table}\n:{self._name} - [0:0]\n{added}COMMIT\n"
        subprocess.run(["iptables-restore", "--wait", "--noflush"], input=text, text=True, check=True)

    @contextmanager
    def first(self, rule: str) -> Iterator[None]:
        """One rule more, before all others, for a while."""
        self._run("-I", self._name, *rule.split())
        try:
            yield
        finally:
            self._run("-D", self._name, *rule.split())

    def counts(self) -> dict[str, int]:
        """Packets by the rules' comments."""
        told = subprocess.run(
            ["iptables", "--wait", "-t", self._table, "-nvxL", self._name], capture_output=True, text=True, check=True
        ).stdout
        return {text: int(packets) for packets, text in re.findall(r"^ *(\d+) .*/\* (.*) \*/", told, re.MULTILINE)}

    def close(self) -> None:
        """Also one that a run before has left."""
        for hook in self._hooks:
            while self._run("-D", *hook.split(), "-j", self._name, fails=True) == 0:
                pass
        for way in ("-F", "-X"):
            self._run(way, self._name, fails=True)

    def _run(self, *words: str, fails: bool = False) -> int:
        command = ["iptables", "--wait", "-t", self._table, *words]
        return subprocess.run(command, check=not fails, capture_output=True).returncode
