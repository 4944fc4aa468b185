"""The host memory that weights lie in (``arena``), one model's copy there (``weight_copy``), how it is cut for the
network (``pieces``), and how a checkpoint gets into it (``loader``)."""
