"""The peer of `grpo_step.py` and `engines.py`: TRL's GRPOTrainer on the same model, problems and sizes.

Prints one JSON line.
"""

import argparse
import json
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from step_timer import StepTimer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from whet_env_math.arithmetic import Arithmetic
from whet_env_math.arithmetic import correct as graded
from whet_env_math.config import ArithmeticConfig


def main() -> None:
    """Train, and print the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", default="runs/bench/trl")
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM in this process, not with transformers")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tasks = Arithmetic(ArithmeticConfig()).tasks("train")
    rows = [
        {"prompt": [{"role": "user", "content": tasks[i].prompt[0].text}], "answer": tasks[i].data["answer"]}
        for i in range(4000)
    ]

    def correct(completions: list, answer: list, **_: object) -> list[float]:
        return [graded(c[0]["content"], {"answer": a}) for c, a in zip(completions, answer, strict=True)]

    timer = StepTimer()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        reward_funcs=correct,
        train_dataset=Dataset.from_list(rows),
        callbacks=[timer],
        args=GRPOConfig(
            output_dir=args.work, max_steps=args.steps, learning_rate=1e-4, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=5, disable_tqdm=True, lr_scheduler_type="constant_with_warmup",
            warmup_steps=3, adam_beta2=0.99, max_grad_norm=1.0, weight_decay=0.0, beta=0.0, bf16=False,
            gradient_checkpointing=False, per_device_train_batch_size=128, num_generations=8,
            max_completion_length=40, temperature=1.0, use_vllm=args.vllm, vllm_mode="colocate",
            vllm_enable_sleep_mode=False, vllm_max_model_length=256,
        ),
    )  # fmt: skip
    trainer.train()
    print(json.dumps({"seconds": timer.seconds, "first": timer.first}))


if __name__ == "__main__":
    main()
