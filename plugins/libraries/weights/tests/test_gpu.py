"""Weight syncs from a GPU to another process, which sees the same bytes."""

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import torch

from whet.interfaces.weights import TransferSpec
from whet_weights import bucket_stream
from whet_weights.exchange import Exchange
from whet_weights.manifest import checksum
from whet_weights.transfer import send

pytestmark = pytest.mark.gpu
RECEIVER = """
import sys, torch
from whet_weights.transfer import receive
from whet.interfaces.weights import TransferSpec
from whet_weights.manifest import checksum
torch.cuda.set_device(int(sys.argv[1]))
spec = TransferSpec(sys.argv[2], sys.argv[3], sys.argv[4], 1, timeout_seconds=60.0, token=sys.argv[5], kept=False)
for name, tensor in receive(spec):
    assert tensor.is_cuda, name
    print(name, checksum(tensor), flush=True)
"""


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    monkeypatch.setattr(bucket_stream, "BUCKET_BYTES", 1 << 20)
    made = Exchange("127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize(("transport", "gpu"), [("cuda-ipc", 0), ("broadcast", 1)])
def test_what_is_on_a_gpu_arrives_on_one(exchange: Exchange, transport: str, gpu: int) -> None:
    if gpu >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    draw = torch.Generator("cuda:0").manual_seed(0)
    weights = [(f"w{n}", torch.randn(200_000 + n, generator=draw, device="cuda:0").bfloat16()) for n in range(20)]
    address, token = exchange.address, exchange.token
    spec = TransferSpec(transport, address, uuid.uuid4().hex, 1, timeout_seconds=60.0, token=token, kept=False)
    command = [sys.executable, "-c", RECEIVER, str(gpu), transport, address, spec.session, token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        send(spec, weights)
        said, _ = receiver.communicate(timeout=120)
    assert receiver.returncode == 0
    assert said.split("\n")[:-1] == [f"{name} {checksum(tensor)}" for name, tensor in weights]
