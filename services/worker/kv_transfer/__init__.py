"""Disaggregated serving: one instance computes prompts (``sender``) and sends their KV to another, which decodes
(``receiver``). Why it is as it is: ``docs/decisions/0014-disaggregated.md``."""
