"""The stages of a save, in order: plan, layout, snapshot, (write), collect, commit. ``nostall._save`` joins them."""
