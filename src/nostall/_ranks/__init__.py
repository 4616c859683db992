"""Communication between ranks, and failures of ranks."""
