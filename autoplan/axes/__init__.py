"""What one dimension of a tensor is: terms, the algebra that makes two of them one, and what can happen to them.

In: sizes. Out: terms (leaf, product, concatenation) and events on leaves. May import: values, common. No torch.
"""
