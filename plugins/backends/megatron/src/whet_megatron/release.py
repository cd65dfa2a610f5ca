"""Writes a model folder as a checkpoint with which Megatron-LM starts, in one process without Megatron.

    latest_checkpointed_iteration.txt    "release": weights alone, so no optimizer and no random state are looked for
    release/metadata.json                the format
    release/common.pt                    arguments of the model, for `--use-checkpoint-args`
    release/.metadata, *.distcp          torch's: the index, and the tensors

Layers have names of their own, which the `content_metadata` in `common.pt` says, and norms have the names that
Transformer Engine's layers have. The vocabulary has no padding: Megatron pads it as the run that loads it likes.
"""

import json
import warnings
from argparse import Namespace
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from whet.data.files import disk_errors
from whet.data.model_info import ModelInfo
from whet.errors import CheckpointError, WhetError
from whet_megatron import architecture, cuts
from whet_megatron.architecture import Architecture
from whet_megatron.cuts import Place
from whet_megatron.foreign import TRACKER
from whet_megatron.rules import Rule
from whet_megatron.stored import StoredWeights, read_folder, stored_weights
from whet_training.whole import refuse_used, whole

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
          "common_backend_version": 1}  # fmt: skip
ALONE = Place(0, 1)
LINEAR = ("qkv", "gated", "columns", "rows")


@frozen
class Piece:
    """A parameter, as it is written."""

    rule: Rule
    stored: tuple[str, ...]
    tensor: str
    """The name of the tensor that has it."""
    size: tuple[int, ...]
    """Of that tensor."""
    lead: tuple[int, ...]
    """Its number among the experts of that tensor, if it is of one."""

    @property
    def state(self) -> str:
        """Return the name of the state that Megatron's and Transformer Engine's linear layers keep."""
        number, of = (self.lead[0], self.size[0]) if self.lead else (0, 1)
        return f"{self.tensor.removesuffix('weight')}_extra_state/shard_{number}_{of}"


def write_release(model: str, out: str) -> str:
    """Write the weights of a model folder to the folder `out`, in their dtype. One parameter is in memory at a time.

    Returns the arguments of Megatron-LM that `--use-checkpoint-args` does not take from a checkpoint. Raises
    `WhetError` if `out` is no new or empty folder, or if weights lack or Megatron cannot compute the model. After an
    error there is no `out`.
    """
    refuse_used(Path(out))
    info = read_folder(model)
    arch = architecture.read(info)
    try:
        with whole(Path(out)) as partial, disk_errors(partial), stored_weights(info.path) as weights:
            folder = partial / "release"
            folder.mkdir()
            pieces = list(_pieces(info, arch, weights))
            weights.check_left_out({name for one in pieces for name in one.stored}, info)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it is one process
                save({}, storage_writer=Writer(folder), planner=Planner(pieces, weights, arch), no_dist=True)
            torch.save({"checkpoint_version": 3.0, "iteration": 0, "args": _arguments(info, arch),
                        "content_metadata": {"non_homogeneous_layers": True}}, folder / "common.pt")  # fmt: skip
            (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
            (partial / TRACKER).write_text("release", encoding="utf-8")
    except CheckpointException as error:  # torch's, with what failed when it wrote
        raise CheckpointError(f"{out} cannot be written: {next(iter(error.failures.values()))[0]}") from error
    return _further(arch)


def _pieces(info: ModelInfo, arch: Architecture, weights: StoredWeights) -> Iterator[Piece]:
    """Yield the parameters of a model. Raises `WhetError` if stored weights have other sizes than the config says."""
    found = architecture.family(info)
    assert found is not None
    for rule in filter(arch.has, found.rules):
        for layer, expert in arch.numbers(rule):
            stored = tuple(one.format(layer=layer, expert=expert) for one in rule.stored)
            shapes = [weights.shape(one) for one in stored]
            size = (sum(one[0] for one in shapes), *shapes[0][1:])
            if shapes != (wanted := cuts.stored_shapes(rule.cut, size, ALONE, arch)):
                raise WhetError(f"{info.path} holds {' and '.join(stored)} as {shapes}, and config.json says {wanted}")
            of_expert = "{expert}" in rule.name
            name = rule.name.replace(".local_experts.{expert}.", ".experts.").format(layer=layer)
            yield Piece(rule, stored, name, (arch.experts, *size) if of_expert else size, (expert,) * of_expert)


class Writer(FileSystemWriter):
    """Writes tensors and index, and not where it did."""

    def storage_meta(self) -> None:
        """Return nothing. torch's index would name this machine's folder, with a class of `pathlib`."""


class Planner(DefaultSavePlanner):
    """Tells torch what to write, and reads each parameter when it is written."""

    def __init__(self, pieces: list[Piece], weights: StoredWeights, arch: Architecture) -> None:
        super().__init__(flatten_state_dict=False)
        self._weights, self._arch = weights, arch
        self._of = {MetadataIndex(one.tensor, [*one.lead, *[0] * (len(one.size) - len(one.lead))]): one
                    for one in pieces}  # fmt: skip

    def create_local_plan(self) -> SavePlan:
        """Return a write for each parameter, and for each state that Megatron asks of linear layers: it is empty."""
        empty = [WriteItem(index=MetadataIndex(one.state), type=WriteItemType.BYTE_IO) for one in self._of.values()
                 if one.rule.cut in LINEAR and one.rule.name.endswith(".weight")]  # fmt: skip
        self.plan = SavePlan([*(self._write(at, one) for at, one in self._of.items()), *empty], planner_data={})
        return self.plan

    def _write(self, at: MetadataIndex, one: Piece) -> WriteItem:
        sizes = torch.Size([*[1] * len(one.lead), *one.size[len(one.lead) :]])
        dtype = self._weights.slices(one.stored[0])[:0].dtype
        assert at.offset is not None
        chunk = ChunkStorageMetadata(offsets=at.offset, sizes=sizes)
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size(one.size))
        return WriteItem(index=at, type=WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the parameter of a write, or the bytes of an empty state."""
        if write_item.type == WriteItemType.BYTE_IO:
            state = BytesIO()
            torch.save([None], state)
            return state
        one = self._of[write_item.index]
        slices, shape = [self._weights.slices(name) for name in one.stored], one.size[len(one.lead) :]
        found = cuts.take(one.rule.cut, slices, shape, ALONE, self._arch)
        return found.reshape(*[1] * len(one.lead), *shape).contiguous()


def _further(arch: Architecture) -> str:
    """Return the arguments of Megatron-LM that it does not take from a checkpoint. The last one's default is 8."""
    scaled = f" --use-rope-scaling --rope-scaling-factor {arch.rope_factor:g}" if arch.rope_factor else ""
    return f"--norm-epsilon {arch.epsilon}{' --qk-layernorm' if arch.qk_norm else ''}{scaled}"


def _arguments(info: ModelInfo, arch: Architecture) -> Namespace:
    """Return the arguments of Megatron-LM that its `--use-checkpoint-args` takes from a checkpoint."""
    of_experts: dict[str, Any] = {
        "num_experts": arch.experts, "moe_ffn_hidden_size": arch.expert_mlp, "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.normalize_chosen,
    } if arch.experts else {}  # fmt: skip
    base = arch.rope_theta
    return Namespace(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.mlp, num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads, group_query_attention=arch.kv_heads != arch.heads, kv_channels=arch.head_dim,
        max_position_embeddings=info.config.get("max_position_embeddings"), position_embedding_type="rope",
        add_position_embedding=True, rotary_base=int(base) if base.is_integer() else base, rotary_percent=1.0,
        add_bias_linear=False, add_qkv_bias=arch.qkv_bias, swiglu=True, normalization="RMSNorm",
        untie_embeddings_and_output_weights=not arch.tied, attention_dropout=0.0, hidden_dropout=0.0,
        ckpt_format="torch_dist", **of_experts,
    )  # fmt: skip
