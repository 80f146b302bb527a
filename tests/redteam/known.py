"""Name the cases that fail today, and why. A line leaves when its case is mended: the suite asks for both."""

KNOWN: dict[str, str] = {}
