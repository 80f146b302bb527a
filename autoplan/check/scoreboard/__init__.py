"""check.scoreboard."""
