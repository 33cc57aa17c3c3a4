"""What a laptop does not have: a slow network, a full memory."""
