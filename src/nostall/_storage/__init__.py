"""Checkpoint files, in directories and object stores: written, read, removed, with deadlines."""
