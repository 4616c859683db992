"""The benchmark behind ``python -m nostall bench --restart``: from process start to first step.

``run.py`` saves a checkpoint and starts the processes, each of which runs ``first_step.py``;
``report.py`` has what they answer, and the table.
"""
