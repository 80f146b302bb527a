"""Plan a checkpoint that nobody has planned, from its folder, and verify the plan.

    python examples/unfamiliar_checkpoint.py [FOLDER]

Without a folder the example creates a small hybrid of attention and Mamba2.
"""

import sys
import tempfile

from transformers import BambaConfig, BambaForCausalLM

import autoplan


def unfamiliar(folder: str) -> str:
    config = BambaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        attn_layer_indices=[2],
        mamba_n_heads=8,
        mamba_d_head=32,
        vocab_size=256,
    )
    BambaForCausalLM(config).save_pretrained(folder)
    return folder


with tempfile.TemporaryDirectory() as made:
    folder = sys.argv[1] if len(sys.argv) > 1 else unfamiliar(made)
    plan = autoplan.plan(folder, tp_size=2)  # from config.json: no weights are read
    print(plan)
    report = autoplan.verify(folder, plan, tp_size=2)
    worst = max(report.gradients.values())
    print(f"on simulated ranks: {'exact' if report.ok else 'wrong'}, largest gradient error {worst:.1e}")
