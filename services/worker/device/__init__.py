"""The seam to the hardware that an instance runs on. Start with ``completion``: what every call to it gives."""
