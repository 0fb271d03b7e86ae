"""The command line: one module to a group of verbs, imported only when one of its verbs is asked for.

Read `main`: it holds the table of verbs and of exit codes.
"""
