"""Model families: what a checkpoint of one is, and where its weights lie. ``families`` has them all.

A family is one module here, without torch, and one of the same name in ``services.worker.engine.models`` that computes.
"""
