"""Plans that people and other libraries wrote, read into one vocabulary (`ChosenCuts`); our own plan files, both ways.

In: dicts, files, dotted paths, plan ids. Out: ChosenCuts, or a Plan. May import: what decide may. Loads no torch.
"""
