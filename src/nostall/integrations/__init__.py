"""Adapters for training frameworks, a module each; importing one imports its framework."""

__all__: list[str] = []
