"""Functions that tests run on several ranks."""
