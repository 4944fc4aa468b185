"""Live scaling in a worker: one member of a pair (paper, section 5.2; ``docs/decisions/0013-pairs.md``).

What is decided in a pair is decided by two machines, ``services.worker.core.live``. Here their actions are carried out.

- *Waiting*, *handed over*, *pulled* and *begun* batches are the source's: should the target be lost, it computes
  them. Only a *taken* one is the target's: it finished the batch, or kept it in the end (``core.live.batch.MOVES``).
- A batch has blocks at the target from ``Reserve`` to ``Free``, and at the source from ``BeginBatch`` on.

Who frees the blocks, and when:

=====================  ===========================================================================================
a hand-over            None are reserved if the target refuses.
a pull                 None: the target's copy may still be on its way.
a claim is settled     The target its own, at once. The source's are free like any request's, but not before the
                       batch's KV is whole or lost: until then it is written there.
a batch is taken       The target, as each request ends. The source has none.
the parting            The target, of what it gives: at once if untouched, else when it is settled or the source is
                       lost.
a cancel               The target: at once; of a batch inside a layer at the layer's end; of a pulled one when it is
                       settled.
the end, as it fails   Both, their own. Requests that the target may have taken without the source's knowing end at
                       the source with an error, and gateways submit them again.
=====================  ===========================================================================================

Start with ``roles`` (which pair this worker is in), then ``member`` (how a machine is driven), ``source`` or ``target``
(what carries each action out), which share ``links`` (what they say to each other) and ``tensors``.
"""
