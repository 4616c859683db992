"""Where bytes go. ``posix`` writes images with large positional writes, ``streams`` through a user's own ``open``."""
