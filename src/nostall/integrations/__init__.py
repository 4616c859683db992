"""Adapters for frameworks, one module each; a framework is imported when its adapter is used."""

__all__: list[str] = []
