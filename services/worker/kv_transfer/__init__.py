"""Disaggregated serving: one instance computes prompts, another decodes (``docs/decisions/0014-disaggregated.md``)."""
