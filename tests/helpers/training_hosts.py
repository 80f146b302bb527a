"""Train a sharded model in transformers' Trainer and under accelerate, on ranks that are gloo processes.

Both read from the environment who they are, so ranks say so first. What is trained is small, in float64, on batches
whose order does not depend on the number of ranks.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesh_toys import mesh_of
from torch import nn

import autoplan
from autoplan.hf.source import resolve

STEPS, BATCH, LENGTH = 4, 4, 6


def built(model_type: str = "llama") -> Any:
    torch.manual_seed(0)
    return resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")


def other() -> Any:
    """Other weights: what is resumed must come from the checkpoint."""
    model = built()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        self.ids = torch.randint(1, 100, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def alone(accumulate: int = 1) -> dict[str, torch.Tensor]:
    """The weights that the unsharded model has after all steps."""
    model = built().train()
    optimizer = optimizer_of(model)
    for step in range(0, len(Texts()), BATCH * accumulate):
        ids = Texts().ids[step : step + BATCH * accumulate]
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def announce(rank: int, size: int) -> None:
    """What torchrun would have said."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)


def trainer_of(model: Any, folder: Path, accumulate: int, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    batch = BATCH // data_ranks(model)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, num_train_epochs=1,
        per_device_eval_batch_size=batch, gradient_accumulation_steps=accumulate,
        lr_scheduler_type="constant", max_grad_norm=0.5, save_strategy="steps", save_steps=2, report_to=[],
        use_cpu=True, ddp_backend="gloo", train_sampling_strategy="sequential", disable_tqdm=True, logging_steps=1,
        logging_strategy="no", **options,
    )  # fmt: skip
    hosted = autoplan.hand_over(Trainer)
    return hosted(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), optimizers=(optimizer_of(model), None))


def data_ranks(model: nn.Module) -> int:
    """How many ranks are given batches of their own: those of cp share one."""
    done = autoplan.applied(model)
    assert done is not None
    replicas, shards = done.data_parallel
    return replicas * max(1, shards // done.plan.cp_size)


def worst(model: nn.Module, wanted: dict[str, torch.Tensor]) -> float:
    found = autoplan.full_tensors(model)
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def trained(rank: int, sizes: dict[str, int], folder: Path, wanted: dict[int, Any]) -> dict[str, Any]:
    """How far Trainer comes, with and without accumulation, and when it goes on from a checkpoint."""
    from accelerate.state import AcceleratorState, PartialState

    announce(rank, dist.get_world_size())
    mesh, found = mesh_of(**sizes), {}
    plan = autoplan.plan(built(), sizes.get("tp", 1), cp_size=sizes.get("cp", 1), prove="none")
    for accumulate in (1, 2):
        model = autoplan.parallelize(built(), mesh, plan)
        trainer = trainer_of(model, folder / str(accumulate), accumulate)
        assert type(trainer).__name__ == "Trainer"
        trainer.train()
        found[f"trained {accumulate}"] = worst(model, wanted[accumulate])
        loss = trainer.evaluate()["eval_loss"]
        found[f"loss {accumulate}"] = abs(loss - evaluated(wanted[accumulate]))
    found["predicted"] = predicted(trainer, wanted[2])
    trainer.save_model(str(folder / "saved"))
    model = autoplan.parallelize(other(), mesh, plan)
    trainer_of(model, folder / "1", 1).train(resume_from_checkpoint=str(folder / "1" / "checkpoint-2"))
    found["resumed"] = worst(model, wanted[1])
    AcceleratorState._reset_state(True), PartialState._reset_state()
    found |= accelerated(rank, mesh, plan, folder, wanted[1])
    return found


def fed(rank: int, size: int, folder: Path, rate: float) -> dict[str, Any]:
    """The batches that a shuffling Trainer trains on after an evaluation and when it goes on, and the seed left."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments

    announce(rank, size)
    seen: dict[str, Any] = {}
    plan = autoplan.plan(_dropping(rate), 2, prove="none") if size > 1 else None
    for name in ("evaluated", "resumed"):
        torch.manual_seed(3)
        model = _dropping(rate)
        if plan is not None:
            model = autoplan.parallelize(model, mesh_of(tp=2), plan)
        batches: list[Any] = []
        model.register_forward_pre_hook(
            lambda module, args, given, to=batches: _note(module, given, to), with_kwargs=True
        )
        arguments = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=BATCH, num_train_epochs=2, save_strategy="steps",
            save_steps=2, report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True, logging_strategy="no",
            lr_scheduler_type="constant",
        )  # fmt: skip
        host = autoplan.hand_over(Trainer) if plan is not None else Trainer
        trainer = host(model, arguments, train_dataset=Texts(), eval_dataset=Texts())
        if name == "evaluated":
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if name == "resumed" else None)
        seen |= {name: batches, f"seed of {name}": torch.initial_seed()}
        AcceleratorState._reset_state(True), PartialState._reset_state()
    return seen


def _dropping(rate: float) -> Any:
    model = built()
    model.config.attention_dropout = rate
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return model


def _note(module: nn.Module, given: dict[str, Any], batches: list[Any]) -> None:
    if module.training:
        batches.append(given["input_ids"].tolist())


def evaluated(weights: dict[str, torch.Tensor]) -> float:
    model = built().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        ids = Texts().ids
        return float(sum(model(input_ids=part, labels=part).loss for part in ids.split(BATCH)) / STEPS)


def predicted(trainer: Any, weights: dict[str, torch.Tensor]) -> float:
    """How far what Trainer collects from all ranks is from the unsharded model's logits, each text once."""
    model = built().eval()
    model.load_state_dict(weights)
    found = torch.as_tensor(trainer.predict(Texts()).predictions)
    with torch.no_grad():
        wanted = model(input_ids=Texts().ids).logits
    return float((found - wanted).abs().max()) if found.shape == wanted.shape else float("inf")


def accelerated(rank: int, mesh: Any, plan: Any, folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A loop under accelerate: saved half way, and gone on with by another model."""
    from accelerate import Accelerator

    found = {}
    for model, begin in ((built(), 0), (other(), 2)):
        model = autoplan.parallelize(model, mesh, plan)
        accelerator = autoplan.hand_over(Accelerator, model)(cpu=True)
        loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH // data_ranks(model))
        model, optimizer, loader = accelerator.prepare(model.train(), optimizer_of(model), loader)
        if begin:
            accelerator.load_state(str(folder / "state"))
        for step, batch in enumerate(loader):
            if step < begin:
                continue
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                accelerator.save_state(str(folder / "state"))
        found[f"accelerate from {begin}"] = worst(model, wanted)
        loader = accelerator.prepare(torch.utils.data.DataLoader(Texts(), batch_size=3))
        collected = torch.cat([accelerator.gather_for_metrics(batch["input_ids"]) for batch in loader])
        found[f"collected from {begin}"] = 0.0 if torch.equal(collected, Texts().ids) else float("inf")
    accelerator.save_model(model, str(folder / "whole"))
    bare = accelerator.unwrap_model(model)
    bare.save_pretrained(
        folder / "accelerate", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    return found
