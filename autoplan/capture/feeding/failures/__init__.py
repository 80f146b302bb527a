"""What a run that failed tells of its arguments: by its operation, its expression, its condition, its message.

In: a failed run with the frames and values of the model's own code. Out: other states to try, the most telling first.
May import: what capture may.
"""
