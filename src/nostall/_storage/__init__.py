"""Checkpoint files, in directories and object stores: written, read back, removed, with deadlines."""
