"""Output for people and other tools: tables, explanations, differences, exports.

In: a Plan, a Report, a Scoreboard. Out: text and tables. May import: values, common, decide. Loads no torch.
"""
