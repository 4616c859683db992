"""Checkpoint files on a POSIX file system: written, read back and removed, with deadlines."""
