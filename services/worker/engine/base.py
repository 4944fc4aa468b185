"""The engine: computes batches, layer by layer. Implementations: ``torch_engine`` and ``mock``.

The scheduler (``services.worker.core.scheduling``) speaks in ids, token counts and block tables; an engine
turns a ``ForwardBatch`` into sampled tokens. All methods are called on the engine thread, but for those that say
otherwise. Nothing here imports torch, so that the core, the mock and the tests start without it.

What a method computes is there when its ``Completion`` is done, and an error of the computing is the completion's; what
the caller got wrong is raised at once, or where only the device knows how far a batch is, and has not come to it, is
the completion's. Calls of one stream take effect in their order: layers, embedding at the beginning of a batch and
sampling are of one, exports and imports each of another. A batch is used by what ``embed`` or ``resume`` returned, done
or not: if it fails, so does with its error whatever is asked of the batch.

A batch can move between two engines of the same model half-way: one exports the KV of the layers it has
run and the hidden states, the other resumes and imports the KV in the meantime (live scaling; see ``handoff`` for the
bytes). Or it runs all layers of a prompt here, its KV moves layer by layer in the meantime, and it is decoded there
(disaggregated serving).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion
from services.worker.engine.forward_batch import ForwardBatch
from shared.messages.generation import PromptLogprobs
from shared.transport.base import Buffer

Activation = Completion[Any]
"""What ``embed`` or ``resume`` returned. It comes to the state of a batch inside the engine, opaque: its attention plan
and hidden states [num_tokens, hidden_size]."""


class Engine(Protocol):
    """A model bound to its weights (arena) and KV pool."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    @property
    def hidden_bytes_per_token(self) -> int:
        """Bytes of one token's hidden state."""

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""

    @property
    def prepared_blocks(self) -> int:
        """How many of the first KV blocks should be prepared before the first request comes."""

    def prepare(self, first: int, last: int) -> None:
        """Make the first steps that use KV blocks ``first <= i < last`` as quick as later ones will be. From any
        thread, also while batches run: it changes nothing that they read."""

    @property
    def rehearses(self) -> bool:
        """Whether there will ever be something to ``rehearse``."""

    def rehearse(self) -> Completion[None] | None:
        """Begin the next thing that makes later steps quicker, between two steps: it computes for nobody, with whatever
        weights are there, and keeps the caller for longer than a step does. None: there is nothing left, for now."""

    def embed(self, batch: ForwardBatch) -> Activation:
        """Plan the batch's attention and embed its tokens."""

    def embed_tokens(self, token_ids: Sequence[int]) -> Completion[Buffer]:
        """Hidden states ``[num_tokens, hidden_size]`` before layer 0, as flat host bytes of the caller's own.

        From any thread. Raises ``BadRequest`` for a token outside of the vocabulary.
        """

    def resume(self, batch: ForwardBatch, hidden: Buffer, *, next_layer: int) -> Activation:
        """As ``embed``, from hidden states that were computed elsewhere up to ``next_layer``.

        ``hidden``: bytes of ``embed_tokens`` or ``hidden_states``; they belong to the activation from now on and
        may be written. Its layers need no KV of the layers before ``next_layer``: that is imported once this is
        done, and must be there before the sequences' next tokens are computed. Raises ``BadRequest`` for a wrong size,
        an empty batch, a short block table, or unless ``0 <= next_layer < num_layers``.
        """

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        """Run decoder layers ``first <= i < last`` in place, writing their KV. Layer by layer costs no more."""

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        """Run one decoder layer for tokens ``begin <= i < end`` of the batch (``ForwardBatch.part``) alone, in place.

        Of a long batch this needs less memory at once, and other batches can be run in between. Parts come in order,
        each token once; the layer has run when ``end`` is the number of tokens. Raises ``BadRequest`` for others.
        """

    def hidden_states(self, activation: Activation) -> Completion[Buffer]:
        """The hidden states ``[num_tokens, hidden_size]`` as flat host bytes: a copy of the caller's own.

        From any thread, while the engine thread runs other batches but not this one. Raises ``BadRequest`` inside a
        layer, and once the last one has run: only the sampled tokens' states are left then.
        """

    def export_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[Buffer]:
        """KV of layers ``first_layer <= i < last_layer`` of positions ``first_tokens[i] .. num_tokens[i]`` of each
        sequence; without ``first_tokens`` of all from 0 on.

        Flat host bytes of ``[last_layer - first_layer, 2 (K, V), total tokens, num_kv_heads, head_dim]``,
        independent of block size and of which blocks: a copy of the caller's own. From any thread, while the engine
        thread runs other batches, later layers of this one, or the sequences' next tokens: only the slots of these
        positions in these layers are read. ``run_layers`` must be done with them. Raises ``BadRequest`` for short
        block tables, blocks outside of the pool, ranges of positions that are none, or unless
        ``0 <= first_layer <= last_layer <= num_layers``.
        """

    def import_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        kv: Buffer,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[None]:
        """The reverse of ``export_kv``: writes the KV into the slots of these positions, in these layers alone.

        Layers of one range of positions may come bit by bit, in their order and each once; the sequences' next tokens
        can be computed when all are there. From any thread, also while a batch of these sequences runs later layers.
        ``kv`` is only read. Raises ``BadRequest`` as ``export_kv`` does, and for a wrong size.
        """

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """The tokens of a request so far, for penalties. From then on the engine's own: ``sample`` adds what it draws.
        Whatever the request puts out must be sampled here."""

    def score(self, activation: Activation) -> Completion[list[PromptLogprobs]]:
        """Log-probabilities of the prompts' own tokens, of each slice that is ``scored``, in their order. All layers
        must have run, and not in parts. Asked of no other batch."""

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        """The next token of each slice that samples, in their order. All layers must have run.

        Draws depend on (seed, position) only, never on the batch. Sampling a position again gives the same token, and
        counts it once.
        """
