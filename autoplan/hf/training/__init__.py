"""What trains a sharded model of transformers: its Trainer and accelerate's Accelerator, or a program of one's own.

In: a user's class, or a chosen mesh. Out: a subclass that trains the sharded way, or the text of a program. May import:
what hf may.
"""
