"""The index of a checkpoint's items, between pickle and manifest of a metadata file."""
