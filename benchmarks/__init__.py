"""Benchmarks of nostall, stock DCP and other libraries beside the limits of the machine.

Run from a clone: ``python -m benchmarks saves|loads|restart|ranks``; docs/benchmarks.md says what
is measured. ``contenders`` has the ways to save and to load, ``saves``, ``loads``, ``restart`` and
``ranks`` measure them, ``report`` has the samples and prints them.
"""
