"""Rewrites of single calls amid a module's own Python.

In: the plan's instructions for calls. Out: a function mode that is entered in the owning module's forward only. May
import: what execute may.
"""
