"""What the two members of a pair decide (live scaling), pure.

``source_queue``: what is lent, handed over and taken back. ``target_work``: which layer the target runs, which batch it
gives, which it keeps. ``source_work``: what the source runs, and when it asks for more. ``batch``: how requests share
one. ``gates``: a computed split. ``pair``: the states.
"""
