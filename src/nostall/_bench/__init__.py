"""The benchmark behind ``python -m nostall bench``: contenders, limits, and how both are measured.

::

    options -> workload -> memory rounds -> timed rounds -> slowdown rounds
        -> verification -> BenchReport -> tables

``run.py`` is the composer, ``session.py`` has the phases; ``measure.py`` says what a figure is,
``targets.py`` what it should be. ``loading`` does the same for loads, ``restarting`` for processes
from their start until a checkpoint is loaded.
"""
