"""C for CPUs, compiled at installation: attention, lenses, linear recurrence, products of few rows.

A variant is chosen by the vector instructions of the processor, in `library`.
"""
