"""Weights that stay in float32 and are shards all the same, as transformers without a hook for them makes them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from whet.errors import ConfigError
from whet_fsdp2.sharding import _shard_all_but_kept
from whet_fsdp2.weights import PolicyWeights


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("gate",)

    def __init__(self, weight):
        super().__init__()
        self.gate = nn.Parameter(weight)


class Holder:
    def __init__(self, model):
        self.model = model


@pytest.fixture
def mesh():
    """Return a mesh of two ranks, of which this process is the first. Its sums leave numbers as they are."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("sharded", "divisor"), [(True, 1), (False, 2)])
def test_only_weights_that_ranks_hold_whole_are_averaged_here(mesh, sharded, divisor):
    weight, gradient = torch.ones(4, 3), torch.full((4, 3), 6.0)
    if sharded:
        weight, gradient = (distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None) for one in (weight, gradient))
    weights = PolicyWeights(Holder(Router(weight)), low_precision=False, ranks=2)
    weights.trained["gate"].grad = gradient
    weights.complete_gradients()
    (found,) = weights.gradients()
    assert torch.equal(found, torch.full_like(found, 6.0 / divisor))


def test_a_kept_weight_that_tensor_parallel_ranks_split_is_refused(mesh):
    whole = Router(torch.ones(4, 3))
    assert _shard_all_but_kept(lambda model: model, whole) is whole
    split = Router(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(ConfigError, match=r"keeps gate in float32.*set backend\.parallel\.tensor: 1"):
        _shard_all_but_kept(lambda model: model, split)
