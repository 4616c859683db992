"""How far a job is, and how it is told to stop."""

from __future__ import annotations


class Cancelled(Exception):
    """The trainer gave the job up."""


class Position:
    """Where the first failing thread was; later failures are consequences and are not recorded."""

    def __init__(self, *, phase: str, path: str) -> None:
        self.phase = phase
        self.path = path

    def move(self, phase: str, path: str) -> None:
        self.phase, self.path = phase, path
