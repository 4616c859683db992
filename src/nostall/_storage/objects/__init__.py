"""Checkpoints in object stores: one storage, and a client for each kind of store."""
