"""What can go wrong in the lab.

shared.errors.Unavailable
├── LabUnavailable    this machine cannot have a lab now; nothing was made, or all of it was taken away
└── LabFailed         a lab that stands, but what was measured in it does not count
"""

from __future__ import annotations

from shared.errors import Unavailable


class LabUnavailable(Unavailable):
    """No root, no iproute2, addresses taken, or hosts that cannot reach each other."""

    code = "lab_unavailable"


class LabFailed(Unavailable):
    """A run that did not do what it was to measure."""

    code = "lab_failed"
