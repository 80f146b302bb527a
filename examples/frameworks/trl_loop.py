"""GRPO as in TRL: sample answers, score them, raise the log-probability of the better ones.

torchrun --nproc-per-node 2 examples/frameworks/trl_loop.py

The policy is sharded; no rank ever holds the logits of all tokens.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)  # ranks of a tp group sample the same tokens
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
config.eos_token_id = config.pad_token_id = None
policy = LlamaForCausalLM(config)
autoplan.parallelize(policy, mesh, autoplan.plan_once(policy, mesh.size()))
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
sampler = {"temperature": 0.9, "top_k": 50}
PROMPT, LIKED = 4, 7
prompts = torch.randint(1, config.vocab_size, (1, PROMPT)).expand(16, -1)


def reward(answers: torch.Tensor) -> torch.Tensor:
    """Reward small token ids."""
    return (answers < config.vocab_size // LIKED).float().mean(-1)


def logprobs(ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the answers under the sampling distribution, one chunk of tokens at a time."""
    hidden = policy.base_model(ids)[0]
    values = autoplan.vocab_parallel_logprobs_from_hidden(hidden, policy.lm_head, ids, chunk_tokens=64, **sampler)
    return values[:, PROMPT - 1 :].clamp(min=-50)  # tokens outside top-k have minus infinity


rewards = []
for _ in range(12):
    with torch.no_grad():
        ids = policy.generate(prompts, max_new_tokens=8, do_sample=True, top_p=1.0, **sampler)
    scores = reward(ids[:, PROMPT:])
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    loss = -(advantages[:, None] * logprobs(ids)).mean()
    loss.backward()
    autoplan.clip_gradients(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    rewards.append(float(scores.mean()))

assert sum(rewards[-3:]) > sum(rewards[:3])
if dist.get_rank() == 0:
    print(f"TRL-style loop: the reward went from {rewards[0]:.2f} to {rewards[-1]:.2f}")
dist.destroy_process_group()
