"""Tests see no terminal: tables are as wide as where output is redirected, also in a worker of pytest-xdist."""

import os

os.environ.pop("COLUMNS", None)
