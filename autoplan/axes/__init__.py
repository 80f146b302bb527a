"""Terms that describe one dimension of a tensor, the algebra that unifies two of them, and the events that mark them.

In: sizes. Out: terms (leaf, product, concatenation) and events on leaves. May import: values, common. No torch.
"""
