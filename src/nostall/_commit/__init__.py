"""Metadata of a checkpoint: collected from all ranks, published, read back, compared with files."""
