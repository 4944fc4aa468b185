"""What the two members of a pair decide (live scaling), pure: two machines, events in and actions out.

``source``, ``target``: the machines. ``life``: the states of a pair; ``batch``: whose a batch is. ``gates``: a computed
split, kept until its batches are here.
"""
