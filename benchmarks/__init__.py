"""The project's own measurements: `make bench`, or `python -m benchmarks NAME ...`.

Each module measures one thing in a process of its own and returns rows. Nothing here is a test: figures
depend on the machine, so they are printed beside the goal and judged by people.
"""
