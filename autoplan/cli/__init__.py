"""The command line. One file per group of commands; data on stdout, messages on stderr, exit codes 0, 1, 2.

In: arguments. Out: tables or JSON. May import: all rooms below. Torch is imported only inside commands that need it.
"""
