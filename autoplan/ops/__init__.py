"""What is known of torch's operations, each said once.

In: a recorded op with the dims of its inputs. Out: the dims of its outputs. May import: values, common, axes. No torch.
"""
