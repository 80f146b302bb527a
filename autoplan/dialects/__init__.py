"""Plans that others wrote, read into `Choices`: one file per dialect, `read.py` decides which."""
