"""From a state dict to the places of its items in files. ``layout`` and ``formats`` are pure."""
