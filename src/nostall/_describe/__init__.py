"""The content of a checkpoint's metadata file, read as far as a load needs it."""
