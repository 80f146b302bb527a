"""The version, in a file of its own so that the build and `autoplan --version` can read it without importing torch."""

__version__ = "0.1.0"
