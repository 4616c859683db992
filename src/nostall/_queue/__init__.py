"""Requests, the processes that work on them, and what happens to them when this one is told to end."""
