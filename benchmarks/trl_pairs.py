"""The peer of `pair_step.py`: TRL's trainers on the same model, pairs and sizes. Prints one JSON line."""

import argparse
import json
import logging
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from step_timer import StepTimer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer


def main() -> None:
    """Train, and print the seconds and the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["dpo", "rm"])
    parser.add_argument("model")
    parser.add_argument("pairs")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--precomputed", action="store_true")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with open(args.pairs, encoding="utf-8") as lines:
        rows = [conversational(json.loads(line)) for line in lines]
    timer = StepTimer()
    trainer = (dpo if args.kind == "dpo" else rm)(
        args,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(rows),
        callbacks=[timer],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(json.dumps({"seconds": timer.seconds, "first": timer.first, "losses": losses}))


def dpo(args: argparse.Namespace, **parts: Any) -> DPOTrainer:
    """Build the trainer of DPO."""
    model, reference = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in range(2))
    config = DPOConfig(**settings(args), beta=0.1, precompute_ref_log_probs=args.precomputed)
    return DPOTrainer(model=model, ref_model=reference, args=config, **parts)


def rm(args: argparse.Namespace, **parts: Any) -> RewardTrainer:
    """Build the trainer of a reward model."""
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=torch.float32)
    return RewardTrainer(model=model, args=RewardConfig(**settings(args)), **parts)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what both have in common."""
    return {
        "output_dir": f"runs/bench/trl-{args.kind}", "max_steps": args.steps, "learning_rate": 1e-4, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "adam_beta2": 0.99, "max_grad_norm": 1.0,
        "weight_decay": 0.0, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": args.batch,
        "max_length": args.max_length,
    }  # fmt: skip


def conversational(pair: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a pair as messages."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": role, "content": pair[name]}] for name, role in roles.items()}


if __name__ == "__main__":
    main()
