"""Requests in, tokens out: the conversation with the gateways."""
