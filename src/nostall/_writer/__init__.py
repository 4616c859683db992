"""The writer process: it writes file images to storage and never imports torch.

``main`` runs in the process, ``trainer_side`` is the trainer's side, ``files`` does the work (also
in the trainer, for synchronous saves) itself or through ``streams``; ``messages`` has the wire
format.
"""
