"""Saves by ``dcp.save`` and ``dcp.async_save`` in which ranks exchange names in place of plans."""
