"""One that workers have died with is computed alone, and the others lose nothing."""

from __future__ import annotations

from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.turns import Turns
from shared.messages.generation import SamplingParams


class Vllm:
    """What it is told, and what is announced."""

    def __init__(self) -> None:
        self.there: dict[str, tuple[int, ...]] = {}
        self.said: list[str] = []
        self.turns = Turns(self.hear, self.word_of, self.announce)

    def hear(self, word: words.Add | words.Leave) -> None:
        if isinstance(word, words.Add):
            assert word.id not in self.there
            assert not word.alone or not self.there
            self.there[word.id] = word.token_ids
        else:
            del self.there[word.id]

    @staticmethod
    def word_of(sequence: ActiveSequence, name: str) -> words.Add:
        return words.Add(
            id=name,
            token_ids=tuple(sequence.tokens),
            num_output=len(sequence.output),
            sampling=words.Sampling(max_tokens=1, seed=1),
            alone=sequence.alone,
        )

    def announce(self, sequence: ActiveSequence, begins: bool) -> None:
        self.said.append(f"{sequence.request_id} {'begins' if begins else 'ended'}")

    @property
    def names(self) -> list[str]:
        return [name.partition(":")[2] for name in self.there]

    def id_of(self, sequence: ActiveSequence) -> str:
        return next(name for name in self.there if self.turns.of(name) is sequence)

    def put_out(self, sequence: ActiveSequence, *, ends: bool = False) -> None:
        name = self.id_of(sequence)
        sequence.append_all([9])
        sequence.finished = ends
        if ends:
            del self.there[name]
        self.turns.advanced(sequence)

    def begin(self) -> None:
        (name,) = self.there
        self.turns.begins(name)


def request(name: str, alone_tokens: int = 0) -> ActiveSequence:
    params = SamplingParams(max_tokens=100, seed=1)
    return ActiveSequence(
        request_id=name,
        attempt=1,
        gateway_id="g",
        prompt=(1, 2),
        output=[],
        params=params,
        eos_token_ids=(),
        alone_tokens=alone_tokens,
    )


def test_a_suspect_has_vllm_for_itself_until_it_has_put_out_its_tokens() -> None:
    vllm, first, second, later = Vllm(), request("first"), request("second"), request("later")
    suspect = request("suspect", alone_tokens=3)
    vllm.turns.add(first)
    vllm.turns.add(second)
    old = vllm.id_of(first)
    vllm.put_out(first)
    vllm.turns.add(suspect)
    vllm.turns.add(later)
    assert (vllm.names, vllm.said) == (["suspect"], [])
    vllm.begin()
    assert vllm.said == ["suspect begins"]
    assert vllm.turns.of(old) is None, "what was on its way counts no more"
    vllm.put_out(suspect)
    vllm.put_out(suspect)
    assert vllm.names == ["suspect"]
    vllm.put_out(suspect)
    assert vllm.said == ["suspect begins", "suspect ended"]
    assert sorted(vllm.names) == ["first", "later", "second", "suspect"]
    assert vllm.there[vllm.id_of(first)] == (1, 2, 9), "it goes on with what it had put out"


def test_suspects_take_turns_and_those_that_end_or_go_leave_theirs() -> None:
    vllm, other = Vllm(), request("other")
    suspects = [request(f"s{n}", alone_tokens=2) for n in range(4)]
    vllm.turns.add(other)
    for suspect in suspects:
        vllm.turns.add(suspect)
    vllm.begin()
    vllm.put_out(suspects[0], ends=True)
    assert vllm.names == ["s1"]
    vllm.begin()
    suspects[2].finished = suspects[1].finished = other.finished = True
    vllm.turns.drop(suspects[2])
    vllm.turns.drop(suspects[1])
    assert vllm.names == ["s3"]
    vllm.begin()
    vllm.turns.drop(other)
    vllm.put_out(suspects[3])
    vllm.put_out(suspects[3])
    assert vllm.names == ["s3"]
    assert vllm.said == ["s0 begins", "s1 begins", "s3 begins", "s3 ended"]


def test_those_that_end_with_the_one_before_were_never_computed_alone() -> None:
    vllm = Vllm()
    suspects = [request(f"s{n}", alone_tokens=2) for n in range(3)]
    for suspect in suspects:
        vllm.turns.add(suspect)
    vllm.begin()
    for suspect in suspects:
        suspect.finished = True
    for suspect in suspects:
        vllm.turns.drop(suspect)
    assert (vllm.names, vllm.said) == ([], ["s0 begins"])
