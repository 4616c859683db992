"""The benchmark behind ``python -m nostall bench --load``: ways of loading, side by side.

::

    options -> workload -> files of each form -> warm rounds -> idle rounds -> cold rounds
        -> parts -> LoadReport -> tables

``run.py`` is the composer, ``session.py`` has the phases; ``measure.py`` says what a figure is,
``targets.py`` what it should be.
"""
