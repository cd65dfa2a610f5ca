"""The peer of `sft_step.py`: TRL's SFTTrainer, packing on, on the same model and records. Prints one JSON line."""

import argparse
import json
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from step_timer import StepTimer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train, and print the seconds of each step, its tokens and its loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("records")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--row", type=int, default=256, help="tokens of a row into which records are packed")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with open(args.records, encoding="utf-8") as lines:
        rows = [conversational(json.loads(line)) for line in lines]
    timer = StepTimer()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=SFTConfig(
            output_dir="runs/bench/trl-sft", max_steps=args.steps, learning_rate=1e-4, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant_with_warmup",
            warmup_steps=3, adam_beta2=0.99, max_grad_norm=1.0, weight_decay=0.0, bf16=False,
            gradient_checkpointing=False, max_length=args.row, packing=True, per_device_train_batch_size=1,
            gradient_accumulation_steps=args.tokens // args.row, torch_compile=args.compile,
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(rows),
        callbacks=[timer],
    )  # fmt: skip
    packed = [len(row) for row in trainer.train_dataset["input_ids"]]
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    tokens = sum(packed) / len(packed) * (args.tokens // args.row)
    print(json.dumps({"seconds": timer.seconds, "first": timer.first, "losses": losses, "tokens": tokens}))


def conversational(record: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a record as messages."""
    return {
        "prompt": [{"role": "user", "content": record["prompt"]}],
        "completion": [{"role": "assistant", "content": record["completion"]}],
    }


if __name__ == "__main__":
    main()
