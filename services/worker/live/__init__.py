"""Live scaling in a worker: one member of a pair (paper, section 5.2; ``docs/decisions/0013-pairs.md``).

Whose a batch of a pair is:

    waiting ──hand over──► handed over ──pull──► pulled ──settle──► settled
                                ╰──────take──► taken

- *waiting*, *handed over*, *pulled* and *settled* batches are the source's: should the target be lost, the source
  computes them. Only a *taken* one is the target's: it finished the batch, or kept it at the dissolution.
- A batch has blocks at the target from the hand-over on, and at the source from the pull on.

=====================  ====================================  ===================================================
the source             the target                            who frees the blocks, and when
=====================  ====================================  ===================================================
HandedOver.hand_over   TargetBatches.hand_over: reserves     The target: none are reserved if it refuses.
                       blocks
Puller.pull, receive:  TargetBatches.pull, send_pulled,      None: the target's copy may still be on its way.
reserves blocks        send_kv
LinkToTarget.settle    TargetBatches.settle                  The target, its own, at once. The source's are free
                                                             like any request's, but not before the batch's KV is
                                                             whole or lost: until then it is written there.
LiveSource.on_taken    TargetBatches.take                    The target, as each request ends. The source has
                                                             none.
LiveSource._dissolve   LiveTarget.on_dissolve: what is kept  The target, of what it gives: at once if untouched,
                       is taken, the rest is pulled          else when it is settled or the source is lost.
LiveSource.cancel      LiveTarget.cancel                     The target: at once; of a batch inside a layer at the
                                                             layer's end; of a pulled one when it is settled.
HandedOver.end: what   LiveTarget.fail: what is not taken    Both, their own. Requests that the target may have
is not taken waits     is dropped                            taken without the source's knowing end at the source
again, at its place                                          with an error, and gateways submit them again.
=====================  ====================================  ===================================================

Start with ``roles`` (which pair this worker is in), then ``source`` or ``target`` (the life of a pair at either), which
share ``links`` (what they say to each other). ``steppers`` run on the engines' threads. What is decided in a pair is in
``services.worker.core.pairing``.
"""
