"""Ask a trained model a few held-out problems with plain transformers."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from whet_env_math.arithmetic import Arithmetic
from whet_env_math.config import ArithmeticConfig


def main(folder: str) -> None:
    """Load the folder and answer five problems."""
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tasks = Arithmetic(ArithmeticConfig()).tasks("test")
    for task in [tasks[i] for i in range(5)]:
        chat = [{"role": "user", "content": task.prompt[0].text}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{task.prompt[0].text}  ->  {answer}   (right: {task.data['answer']})")


if __name__ == "__main__":
    main(sys.argv[1])
