"""The table host × call of docs/frameworks.md: what users do with a sharded model, and the result.

    PYTHONPATH=tests/helpers python -m host_table docs/frameworks.md

rewrites it between its two marks and keeps the text around it. Each row names the test that shows it:
tests/project/test_docs.py compares the page with this list, and checks that each named test exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ROWS", "Row", "table", "with_table"]

_BEGIN = "<!-- Written by `PYTHONPATH=tests/helpers python -m host_table docs/frameworks.md`. Do not edit by hand. -->"
_END = "<!-- Written by hand from here on. -->"


@dataclass(frozen=True)
class Row:
    """One call. `how`: what to write, or what to know. `error`: for a call that is not supported, the error message."""

    host: str
    call: str
    verdict: Literal["unchanged", "one line", "not supported"]
    how: str
    shown_by: str
    error: str = ""


_NEXT = "test_next_calls.py::"
_HANDS = "test_in_others_hands.py::"
_FLOWS = "test_training_flows.py::test_every_flow_trains_as_on_one_device"
_HOSTED = "test_training_hosts.py::test_trained_saved_and_resumed"

ROWS = (
    Row(
        "transformers",
        "`model.generate(...)`: greedy, sampling, beam search, static and dynamic caches, prompt lookup, assisted",
        "unchanged",
        "",
        "test_generate.py::test_a_sharded_model_writes_the_same",
    ),
    Row(
        "transformers",
        "evaluation and search under `torch.no_grad()`",
        "unchanged",
        "logits are full there ([losses.md](losses.md))",
        "test_generate.py::test_logits_are_split_where_gradients_are_computed_and_the_choice_can_be_changed",
    ),
    Row(
        "transformers",
        "`model.save_pretrained(folder)`, then `from_pretrained(folder)`",
        "unchanged",
        "on every rank",
        "test_saving.py::test_the_files_are_those_of_the_unsharded_model",
    ),
    Row(
        "transformers",
        "`save_pretrained(..., push_to_hub=True)`",
        "not supported",
        "upload the folder",
        "test_saving.py::test_the_library_saves_its_own_model_again_when_the_plan_is_undone",
        error="a sharded model cannot be saved with",
    ),
    Row(
        "transformers",
        "`Trainer`: train, accumulate, clip, evaluate, `save_model`, resume",
        "one line",
        "`autoplan.hand_over(Trainer)(model, args, ...)`; ranks of one cp group get the same batches, like those of tp",
        _HOSTED,
    ),
    Row(
        "accelerate",
        "`prepare`, `backward`, `clip_grad_norm_`, `save_state`, `load_state`, `get_state_dict`",
        "one line",
        "`autoplan.hand_over(Accelerator, model)()`",
        _HOSTED,
    ),
    Row(
        "transformers",
        "the head, the embedding or `model.forward(...)` called directly; `base_model.save_pretrained`",
        "unchanged",
        "",
        f"{_NEXT}test_parts_of_a_model_are_called_and_saved_by_themselves",
    ),
    Row(
        "transformers",
        "`resize_token_embeddings`, `set_output_embeddings`",
        "not supported",
        "resize first, then plan",
        f"{_NEXT}test_a_module_that_is_replaced_takes_the_plan_with_it_or_is_refused",
        error="its table of",
    ),
    Row(
        "transformers",
        "`Trainer.predict`, metrics, `accelerator.gather_for_metrics`, `accelerator.save_model`",
        "one line",
        "`autoplan.hand_over`: each sample counts once, although all tp ranks have it",
        _HOSTED,
    ),
    Row(
        "PEFT",
        "LoRA planned and trained",
        "unchanged",
        "",
        "test_peft.py::test_exact_and_nothing_of_the_model_is_touched",
    ),
    Row(
        "PEFT",
        "LoRA or QLoRA on a model on meta: `autoplan.load_weights(peft_model, folder_of_the_base)`",
        "unchanged",
        "loads the base by its own names; adapters with values keep them, adapters on meta are initialised by peft, "
        "equal on all ranks. Adapters initialised from weights (DoRA, `trainable_token_indices`) are an error",
        "test_peft.py::test_a_base_on_meta_is_loaded_by_its_own_names",
    ),
    Row(
        "PEFT",
        "LoRA on FSDP2 × tp: train, `generate`",
        "unchanged",
        "",
        "test_peft.py::test_adapters_train_on_fsdp_by_tensor_parallelism_and_the_model_writes_the_same",
    ),
    Row(
        "PEFT",
        "`merge_and_unload`, `unload`, `save_pretrained` of adapters and of merged models",
        "unchanged",
        "",
        "test_peft.py::test_adapters_are_merged_taken_off_and_saved_as_those_of_the_unsharded_model",
    ),
    Row(
        "PEFT",
        "`get_peft_model`, `add_adapter`, `load_adapter` of a new adapter on a sharded model",
        "not supported",
        "add adapters first, then plan",
        "test_peft.py::test_adapters_that_come_after_sharding_are_refused",
        error="weights of its own after the model was sharded",
    ),
    Row(
        "TRL",
        "`SFTTrainer` (LoRA too), `DPOTrainer` and `KTOTrainer` with a `ref_model` sharded the same way, "
        "`GRPOTrainer`, `RLOOTrainer`: a step",
        "one line",
        "`autoplan.hand_over(SFTTrainer)(model, args=...)`. Their fused head reads the full weight, as it does "
        "under FSDP2: during its forward and backward each rank holds all rows of that weight. Ranks of one tp group "
        "sample the same completions",
        "test_trl.py::test_a_step_is_that_of_one_process",
    ),
    Row(
        "torch",
        "your own losses: `F.cross_entropy(logits.view(-1, v), labels)`, `gather`, `kl_div`, label smoothing",
        "unchanged",
        "cross-entropy works on the sharded vocabulary; other functions of logits and plain tensors gather the logits",
        f"{_NEXT}test_a_loss_of_ones_own_takes_the_logits_as_they_come",
    ),
    Row(
        "torch",
        "`loss_parallel()`, `float(logits.sum())`, `logits.argmax(-1)`",
        "unchanged",
        "",
        f"{_NEXT}test_numbers_of_split_logits_are_those_of_all_or_refused",
    ),
    Row(
        "torch",
        "second derivatives: `torch.autograd.grad(..., create_graph=True)`, penalties on gradients",
        "unchanged",
        "of inputs, and of parameters without rows on two ranks ([limits](limits.md)); not with FSDP2",
        f"{_HANDS}test_gradients_are_differentiated_again_and_hidden_states_have_losses_of_their_own",
    ),
    Row(
        "torch",
        "`torch.func.grad`, `vjp`, `jvp`, `vmap` around the model, forward-mode AD, `torch.export`",
        "not supported",
        "`torch.autograd.grad`; `torch.compile`",
        f"{_HANDS}test_backward_is_watched_and_functions_of_functions_are_refused",
        error="is sharded and cannot be called inside",
    ),
    Row(
        "torch",
        "`register_full_backward_hook`, `torch.autograd.detect_anomaly()`",
        "unchanged",
        "what hooks see: [below](#what-hooks-on-a-sharded-model-see)",
        f"{_HANDS}test_backward_is_watched_and_functions_of_functions_are_refused",
    ),
    Row(
        "torch",
        "`clip_grad_norm_`, `get_total_norm`",
        "unchanged",
        "",
        f"{_HANDS}test_torch_counts_rows_with_two_holders_once",
    ),
    Row(
        "torch",
        "element-wise optimizers, also fused on GPUs; `LBFGS`, `Muon`, `Adafactor`",
        "unchanged",
        "`LBFGS`, `Muon` and `Adafactor` if no row is on two ranks; otherwise an error",
        f"{_HANDS}test_optimizers_of_whole_parameters_step_or_say_why_not",
    ),
    Row(
        "torch",
        "`Rprop`",
        "not supported",
        "use an element-wise optimizer",
        f"{_HANDS}test_optimizers_of_whole_parameters_step_or_say_why_not",
        error="cannot step on sharded parameters",
    ),
    Row(
        "torch",
        "`parameter.data = x`, `model.float()` after sharding",
        "unchanged",
        "x is sharded like the parameter, or a full plain tensor",
        f"{_HANDS}test_data_that_is_assigned_is_computed_with_and_casts_forget_nothing",
    ),
    Row(
        "torch",
        "`parameter.data = x` of a parameter in an FSDP2 unit",
        "unchanged",
        "outside of a forward; x is sharded like the parameter, or a full plain tensor",
        f"{_HANDS}test_data_of_what_fsdp_shards_is_assigned_but_in_a_forward",
    ),
    Row(
        "torch",
        "`set_model_state_dict(..., full_state_dict=True)`, with and without `broadcast_from_rank0`",
        "unchanged",
        "",
        f"{_HANDS}test_whole_state_dicts_are_loaded_and_safetensors_says_how_to_save",
    ),
    Row(
        "safetensors",
        "`save_model`, `save_file` of a sharded model",
        "not supported",
        "`autoplan.save_weights(model, folder)`",
        f"{_HANDS}test_whole_state_dicts_are_loaded_and_safetensors_says_how_to_save",
        error="safetensors writes plain tensors",
    ),
    Row(
        "torch",
        "`copy.deepcopy(model)` (references, `AveragedModel`), trained on its own",
        "unchanged",
        "torch refuses to copy FSDP2 units: use state dicts, or a second model",
        f"{_NEXT}test_a_copy_trains_and_averages_as_the_model_does",
    ),
    Row(
        "torch",
        "`pickle`, `torch.save(model)`",
        "not supported",
        "use `save_pretrained`, `autoplan.save_weights`, or the state dict",
        f"{_NEXT}test_a_copy_trains_and_averages_as_the_model_does",
        error="a sharded model cannot be pickled",
    ),
    Row(
        "torch",
        "`DistributedDataParallel(model)`",
        "not supported",
        "use a `dp_replicate` or `dp_shard` dim of the mesh",
        f"{_NEXT}test_a_module_that_is_replaced_takes_the_plan_with_it_or_is_refused",
        error="DistributedDataParallel around a sharded model",
    ),
    Row(
        "torch",
        "replacing a module later",
        "not supported",
        "unless the new module wraps the old one without weights of its own, or was inside it",
        f"{_NEXT}test_a_module_that_is_replaced_takes_the_plan_with_it_or_is_refused",
        error="was sharded and cannot be replaced by another",
    ),
    Row(
        "torch",
        "one rank raises inside a block while others continue; ranks leave one stack at different depths",
        "not supported",
        "`init_process_group(timeout=...)` ends the wait ([below](#ranks-that-stop-at-different-places))",
        f"{_NEXT}test_a_rank_that_stops_inside_a_block_is_waited_for_no_longer_than_the_timeout",
        error="communication failed inside",
    ),
    Row(
        "torch",
        "meta → `parallelize` → `to_empty` → distributed checkpoint",
        "one line",
        "after `to_empty`: `autoplan.rebuild_buffers(model)`",
        _FLOWS,
    ),
    Row(
        "torch",
        "meta → `parallelize` → safetensors folder",
        "one line",
        "`autoplan.load_weights(model, folder)`",
        "test_load_weights.py::test_a_transformers_checkpoint_fills_its_meta_model",
    ),
    Row("torch", "`set_requires_gradient_sync` while gradients accumulate", "unchanged", "", _FLOWS),
    Row("torch", "`torch.autocast`, a model in bfloat16", "unchanged", "", _FLOWS),
    Row(
        "torch",
        "master weights in float32, compute in bfloat16",
        "one line",
        '`parallelize(..., mp_policy="bf16")`, or FSDP2\'s own policy',
        _FLOWS,
    ),
    Row(
        "torch",
        "a parameter that only some ranks use",
        "one line",
        "`model.set_reduce_scatter_unused_params(True)`, once",
        _FLOWS,
    ),
    Row(
        "torch",
        "a tower that only some ranks run (batches with and without images), or blocks of one class",
        "one line",
        "`model.set_reduce_scatter_unused_params(True)`, once",
        "test_skipped_towers.py::test_batches_with_and_without_images_train_together",
    ),
    Row(
        "torch",
        "such a tower whose blocks have FSDP2 units inside (another dtype)",
        "not supported",
        "run it on every rank, on zeros where a rank has no input for it",
        "test_skipped_towers.py::test_units_inside_of_skipped_blocks_are_refused_on_every_rank",
        error="is an FSDP2 unit of its own",
    ),
    Row(
        "torch",
        "CPU offload",
        "one line",
        "`cpu_offload=True`, or `offload_policy=CPUOffloadPolicy(pin_memory=False)`",
        _FLOWS,
    ),
    Row(
        "torch",
        "CPU offload with pinned memory on a machine without an accelerator",
        "not supported",
        "`cpu_offload=True` pins memory if there is a GPU, tested on an H100 (2026-11-28)",
        "test_fsdp.py::test_pinned_memory_without_an_accelerator_is_refused_before_anything_is_done",
        error="pins memory for an accelerator, but torch finds none",
    ),
    Row(
        "torch",
        "a mesh with `cp`",
        "unchanged",
        "FSDP2 shards over `dp_shard` and `cp` flattened, so gradients are averaged over both",
        _FLOWS,
    ),
    Row(
        "torch",
        "a mesh with `cp` not next to `dp_shard`",
        "not supported",
        "put `cp` right after `dp_shard`",
        "test_training_flows.py::test_a_context_dim_that_cannot_be_sharded_over_is_refused_unless_flattened_by_the_caller",
        error="the mesh has separate dims",
    ),
    Row(
        "torch",
        "a mesh with `pp`",
        "unchanged",
        "blocks stay gathered between forward and backward unless `reshard_after_forward` is set",
        _FLOWS,
    ),
    Row(
        "torch",
        "`torch.compile` of a model that computes its loss with `nn.CrossEntropyLoss`; losses under `torch.autocast`",
        "unchanged",
        "",
        f"{_HANDS}test_losses_have_the_types_of_the_unsharded_model_and_compiled_ones_know_that_logits_are_split",
    ),
    Row(
        "torch",
        "`torch.compile(model)`, `block.compile()`",
        "unchanged",
        "[below](#compiled)",
        "test_compile.py::test_steps_compile_with_checkpointing_labels_and_any_length",
    ),
)


def table() -> str:
    lines = ["| framework | call | result | how | shown by |", "|---|---|---|---|---|"]
    for row in ROWS:
        how = f'{row.how}; error: "… {row.error} …"' if row.error else row.how
        lines.append(f"| {row.host} | {row.call} | {row.verdict} | {how} | `{row.shown_by}` |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return the page with its table rewritten."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
