"""Reading the items of a load plan; :mod:`nostall._read.items.load` puts the parts together."""
