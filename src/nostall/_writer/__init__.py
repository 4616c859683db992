"""The writer process: it puts file images on storage and never imports torch.

``main`` is what runs in it, ``handle`` the trainer's side of it, ``files`` the work itself (used in the trainer too,
for synchronous saves), ``chunks`` and ``streams`` its two ways, ``messages`` what travels between them.
"""
