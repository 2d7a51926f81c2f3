"""One number instead of many commands: how small, how fast or at what loss."""
