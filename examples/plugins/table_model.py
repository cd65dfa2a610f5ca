"""A model that is no transformer: a table of logits [V, V], of each token after each other one.

The backend `table` trains it and the generator `table` samples from it, both with the tokenizer of `model.path`.
It begins as the uniform distribution. A step takes milliseconds.
"""

import numpy as np
import torch
from attrs import field, frozen
from safetensors.torch import load_file, save_file

import whet
from whet.component import import_path
from whet_generation.serial import SerialGenerator, SerialWorker
from whet_ops.backend_handle import WorkerBackend
from whet_ops.backend_worker import BackendWorker
from whet_weights.transfer import receive, send


@frozen
class BackendConfig:
    """Trains a table of logits by plain gradient descent."""

    lr: float = field(default=1.0, validator=whet.between(0, 1e6))
    """Learning rate."""


@frozen
class GeneratorConfig:
    """Samples from a table of logits."""


def backend_facts(config, model):
    return whet.BackendFacts(outputs_given=frozenset({"logprobs"}), transports=("shared", "disk"))


def generator_facts(config, model):
    return whet.GeneratorFacts(transports=("shared", "disk"))


class TrainWorker(BackendWorker):
    def start(self):
        size = self.info.vocab_size
        self.lr, self._table = self.config.lr, torch.zeros(size, size, device=self.device, requires_grad=True)

    def outputs(self, batch, names):
        logits = self._table[batch["tokens"].roll(1)]  # row t: what follows token t - 1
        if "temperature" in batch:
            logits = logits / batch["temperature"].repeat_interleave(batch["lengths"])[:, None]
        logprobs = logits.log_softmax(-1).gather(-1, batch["tokens"][:, None])[:, 0]
        first = batch["lengths"].cumsum(0) - batch["lengths"]
        return {"logprobs": logprobs.index_fill(0, first, 0.0)}

    def clip(self):
        return float(self._table.grad.norm())

    def step(self):
        with torch.no_grad():
            self._table -= self.lr * self._table.grad
        self._table.grad = None

    def send_weights(self, spec):
        send(spec, [("table", self._table.detach())])

    def write(self, folder):
        save_file({"table": self._table.detach()}, folder / "table.safetensors")

    def read(self, folder):
        saved = load_file(folder / "table.safetensors")["table"]
        if saved.shape != self._table.shape:
            raise ValueError(f"the table saved there is {list(saved.shape)}, this one is {list(self._table.shape)}")
        with torch.no_grad():
            self._table.copy_(saved)

    def write_model(self, folder):
        save_file({"table": self._table.detach()}, f"{folder}/table.safetensors")

    def move(self, device):
        self._table.data = self._table.data.to(device or self.device)


class SampleWorker(SerialWorker):
    def start(self):
        self._table = np.zeros((self.info.vocab_size, self.info.vocab_size), np.float32)

    def continued(self, request):
        draws, token = np.random.default_rng(request.seed), request.tokens[-1]
        while True:
            logits = self._table[token].astype(np.float64) / (request.sampling.temperature or 1.0)
            logprobs = logits - np.logaddexp.reduce(logits)
            greedy = request.sampling.temperature == 0
            token = int(logprobs.argmax() if greedy else draws.choice(len(logprobs), p=np.exp(logprobs)))
            yield token, float(logprobs[token])

    def take(self, spec):
        ((_, table),) = receive(spec, self.rank.rank)
        self._table = table.cpu().numpy().copy()

    def move(self, device):
        pass


class TableBackend(WorkerBackend):
    worker = import_path(TrainWorker)


class TableGenerator(SerialGenerator):
    worker = import_path(SampleWorker)


@whet.hookimpl
def whet_backends():
    return [whet.Component("table", BackendConfig, ":TableBackend", ":backend_facts")]


@whet.hookimpl
def whet_generators():
    return [whet.Component("table", GeneratorConfig, ":TableGenerator", ":generator_facts")]
