"""The pages of ``docs/reference``: tables of settings, metrics and commands, made from the code.

``make reference`` writes them; ``tests/docs/test_reference.py`` compares.
"""
