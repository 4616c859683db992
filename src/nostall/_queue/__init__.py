"""Requests, the processes that run them, and their fate when the trainer ends."""
