"""The command line. One file for each group of commands; data on stdout, messages on stderr, exit codes 0, 1, 2.

In: arguments. Out: tables or JSON. May import: all rooms below. Torch is loaded inside commands that
need it, nowhere else.
"""
