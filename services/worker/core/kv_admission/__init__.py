"""What the two sides of a transfer of KV decide, pure: how long room is asked for, and how much may be on its way."""
