"""What leaves the path for people and files: plan files, tables, explanations, differences, pages of rules."""
