"""One step of TRL's trainers, on one process and on gloo ranks: their loss is made by a forward that TRL sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mesh_toys import mesh_of
from training_hosts import announce, built

import autoplan

TEXTS = [("w5 w6 w7", "w8 w9 w20 w21", "w9 w30"), ("w11 w12", "w13 w14 w15", "w40 w41 w42"),
         ("w16 w17 w18 w19", "w22", "w43"), ("w23 w24", "w25 w26 w27", "w44 w45")]  # fmt: skip


def tokenizer() -> Any:
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number for number in range(4, 90)}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def model_of(adapters: bool) -> Any:
    model = built()
    if adapters:
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        model = get_peft_model(model, options)
    return model


def trainer_of(kind: str, model: Any, reference: Any, folder: Path, replicas: int, host: Any) -> Any:
    """`host`: what is made of TRL's class. A step takes all texts."""
    import trl
    from datasets import Dataset

    given: dict[str, Any] = {} if reference is None else {"ref_model": reference}
    rows = [{"prompt": prompt, "completion": f" {good}"} for prompt, good, _ in TEXTS]
    options: dict[str, Any] = {}
    if kind == "KTO":
        rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(rows)]
    if kind in ("GRPO", "RLOO"):
        rows = [{"prompt": prompt} for prompt, *_ in TEXTS]
        given |= {"reward_funcs": rewards}
        options = {"num_generations": 2, "max_completion_length": 5, "beta": 0.0}
    if kind == "DPO":
        rows = [{"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"} for prompt, good, bad in TEXTS]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), per_device_train_batch_size=len(TEXTS) // replicas, max_steps=1, report_to=[],
        use_cpu=True, ddp_backend="gloo", disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=0.5,
        save_strategy="no", logging_steps=1, bf16=False, gradient_checkpointing=False,
        **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    return host(getattr(trl, f"{kind}Trainer"))(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        optimizers=(optimizer, None), **given,
    )  # fmt: skip


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Of each completion: how many of its words have an even number."""
    return [float(sum(word[-1] in "02468" for word in text.split())) for text in completions]


def one_step(rank: int, kind: str, sizes: dict[str, int], adapters: bool, parallel: bool, folder: Path) -> Any:
    """The loss of a step and all weights after it."""
    announce(rank, torch.distributed.get_world_size())
    models, host, replicas = [model_of(adapters).train()], lambda cls: cls, 1
    if kind in ("DPO", "KTO") and not adapters:
        models.append(model_of(adapters))  # it is held against one that does not train
    if sizes:
        plan = autoplan.plan(model_of(adapters), sizes.get("tp", 1), sequence_parallel=parallel, prove="none")
        models = [autoplan.parallelize(model, mesh_of(**sizes), plan) for model in models]
        host, replicas = autoplan.hand_over, sizes.get("dp_shard", 1)
    model, reference = (*models, None)[:2]
    trainer = trainer_of(kind, model, reference, folder, replicas, host)
    trainer.train()
    logged = trainer.state.log_history[0]
    return logged["loss"], {name: value.detach().clone() for name, value in autoplan.full_tensors(model).items()}
