"""Make a small mixture of experts with the tokenizer of the quickstart.

    whet demo --steps 0                                              # the data and the tokenizer
    python examples/quickstart/make_experts.py runs/quickstart-0/start models/experts-0/start

8 experts in each of 4 layers, 2 of which compute each token: 2.9 million parameters, 1.1 million for each token.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from whet_start.small_models import make_model

if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    tokenizer = AutoTokenizer.from_pretrained(source)
    make_model(target, tokenizer, family="qwen3_moe", hidden=128, layers=4, heads=4, kv_heads=4, mlp=192)
