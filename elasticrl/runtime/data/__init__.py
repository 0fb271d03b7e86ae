"""Data: which samples a step gets (`cursor`), loading them (`loader`), and the proof of what was used (`ledger`, `audit`).

The one idea: the samples of a step are a function of names (epoch, step, update, lane), not of a loader's position. So any
worker can compute them, none can lose its place, and an end of an epoch is a number like any other.
"""
