"""Values and gradients of every loss of TRL 1.16's DPO trainer, on pairs of different lengths.

The numbers in `GAVE` came from the trainer's own `_compute_loss`, called on a stand-in for the model that gives
logprobs. Where TRL is installed it is called again:

    pip install trl==1.16.0 accelerate && pytest plugins/algorithms/dpo/tests/test_trl.py
"""

import importlib.util
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from whet.component import Selection, resolve
from whet.config.structure import structure
from whet.data.batch import Batch, from_sequences
from whet.plugins.registry import load_plugins
from whet_dpo.whole import WholeBatch

installed = cache(load_plugins)

LENGTHS = ((3, 5), (1, 2), (6, 4), (4, 1), (2, 2), (5, 7))
"""Tokens of each pair's responses."""
PROMPT = 2


@frozen
class Peer:
    """A loss here, and the settings of TRL's trainer for the same."""

    ours: dict[str, Any]
    settings: dict[str, Any]


def rows() -> list[int]:
    """Return the lengths of all responses, chosen ones first."""
    return [pair[0] for pair in LENGTHS] + [pair[1] for pair in LENGTHS]


def padded(which: str) -> Any:
    """Return made-up logprobs of the policy or the reference as padded rows [2P, L - 1], 0 where nothing is learned."""
    rng = np.random.default_rng({"policy": 11, "reference": 12}[which])
    width = PROMPT + max(map(max, LENGTHS)) - 1
    found = np.zeros((2 * len(LENGTHS), width))
    for row, length in enumerate(rows()):
        found[row, PROMPT - 1 : PROMPT - 1 + length] = -rng.exponential(1.5, length)
    return found.astype(np.float32)


def batch() -> Batch:
    """Return the pairs as a batch, with the reference's logprobs."""
    sequences, references = [], padded("reference")
    for unit, pair in enumerate(LENGTHS):
        for other, length in enumerate(pair):
            row = unit + other * len(LENGTHS)
            mask = np.arange(PROMPT + length) >= PROMPT
            reference = np.where(mask, np.concatenate([[0.0], references[row, : PROMPT + length - 1]]), 0)
            sequences.append(
                {"tokens": np.arange(len(mask)), "loss_mask": mask, "reference_logprobs": reference.astype(np.float32)}
            )
    units = [unit for unit in range(len(LENGTHS)) for _ in range(2)]
    made = from_sequences(sequences, prompt_lengths=[PROMPT] * len(sequences), unit=units)
    return made.with_columns(chosen=np.array([True, False] * len(LENGTHS)))


def flat(values: Any) -> Any:
    """Turn padded rows [2P, L - 1] into the tokens of the batch [N]."""
    found = []
    for unit, pair in enumerate(LENGTHS):
        for other, length in enumerate(pair):
            found.append(np.concatenate([[0.0], values[unit + other * len(LENGTHS), : PROMPT + length - 1]]))
    return np.concatenate(found).astype(np.float32)


def unflat(values: Any) -> Any:
    """Turn the tokens of the batch [N] into padded rows [2P, L - 1]."""
    found, at = np.zeros_like(padded("policy")), 0
    for unit, pair in enumerate(LENGTHS):
        for other, length in enumerate(pair):
            found[unit + other * len(LENGTHS), : PROMPT + length - 1] = values[at + 1 : at + PROMPT + length]
            at += PROMPT + length
    return found


def selected(document: dict[str, Any]) -> Selection:
    """Return the loss that a section of a config chooses."""
    registry = installed()
    component = registry.find("losses", document["use"]).component
    keys = {key: value for key, value in document.items() if key != "use"}
    return Selection("losses", component, structure(keys, component.config, registry))


def with_whole(document: dict[str, Any], made: Batch, policy: Any) -> Batch:
    """Add the columns that the algorithm would add, where the policy gives these logprobs [N]."""
    backend = SimpleNamespace(score=lambda batch, outputs, weights="policy": {"logprobs": policy})
    steps, section = SimpleNamespace(done=0), SimpleNamespace(run=SimpleNamespace(folder="nowhere"))
    parts: Any = SimpleNamespace(backend=backend, steps=steps, config=section)
    return WholeBatch(parts, selected(document))(made)


def objective(document: dict[str, Any], made: Batch, policy: Any) -> tuple[float, Any, dict[str, float]]:
    """Return the value of a loss, its gradient by the logprobs [N], and its metrics."""
    chosen = selected(document)
    loss = resolve(chosen.component.target)(chosen.config)
    torched = made.map(torch.from_numpy)
    logprobs = torch.from_numpy(policy.astype(np.float32)).requires_grad_()
    result, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    (gradient,) = torch.autograd.grad(value, logprobs)
    return float(value.detach()), gradient.numpy(), {name: metric.number() for name, metric in result.metrics.items()}


def computed(case: Peer) -> tuple[float, Any]:
    """Return the value of our loss and its gradient as padded rows."""
    policy = flat(padded("policy"))
    value, gradient, _ = objective(case.ours, with_whole(case.ours, batch(), policy), policy)
    return value, unflat(gradient)


def _divergences() -> dict[str, Peer]:
    kinds = {
        "forward-kl": ("forward_kl", {}),
        "jensen-shannon": ("js_divergence", {}),
        "alpha": ("alpha_divergence", {"f_alpha_divergence_coef": 0.7}),
    }
    of = {"dpo": "sigmoid", "hinge": "hinge", "ipo": "ipo", "discopop": "discopop", "robust-dpo": "robust"}
    found = {}
    for use, loss_type in of.items():
        for ours, (theirs, more) in kinds.items():
            beta = 0.05 if use == "discopop" else 0.3  # with 0.3 and forward-kl TRL gives NaN: 0 times infinity
            document = {"use": use, "beta": beta, "divergence": ours, **({"divergence_alpha": 0.3} if more else {})}
            settings = {"loss_types": [loss_type], "beta": beta, "f_divergence_type": theirs, **more}
            if use == "robust-dpo":
                settings["label_smoothing"] = 0.1
            found[f"{use}, {ours}"] = Peer(document, settings)
    return found


def _one(use: str, loss_type: str, ours: dict[str, Any] | None = None, **settings: Any) -> Peer:
    return Peer({"use": use, "beta": 0.3, **(ours or {})}, {"loss_types": [loss_type], "beta": 0.3, **settings})


MPO = {
    "use": "weighted-sum",
    "terms": [
        {"use": "dpo", "beta": 0.3, "weight": 0.8},
        {"use": "bco-pair", "beta": 0.3, "shift": "none", "weight": 0.2},
        {"use": "sft"},
    ],
}
CASES: dict[str, Peer] = {
    "dpo": _one("dpo", "sigmoid"),
    "dpo by token": _one("dpo", "sigmoid_norm", {"average_logprobs": True}),
    "robust-dpo": _one("robust-dpo", "robust", label_smoothing=0.1),
    "hinge": _one("hinge", "hinge"),
    "ipo": _one("ipo", "ipo"),
    "exo-pair": _one("exo-pair", "exo_pair", label_smoothing=1e-3),
    "exo-pair, more smoothing": _one("exo-pair", "exo_pair", {"label_smoothing": 0.2}, label_smoothing=0.2),
    "nca-pair": _one("nca-pair", "nca_pair"),
    "bco-pair": _one("bco-pair", "bco_pair", {"shift": "none"}),
    "sppo-hard": _one("sppo-hard", "sppo_hard"),
    "aot": _one("aot", "aot"),
    "aot with label smoothing": _one("aot", "aot", {"label_smoothing": 0.15}, label_smoothing=0.15),
    "aot-unpaired": _one("aot-unpaired", "aot_unpaired"),
    "aot-unpaired with label smoothing": _one(
        "aot-unpaired", "aot_unpaired", {"label_smoothing": 0.15}, label_smoothing=0.15
    ),
    "discopop": _one("discopop", "discopop"),
    "discopop, warmer": _one("discopop", "discopop", {"temperature": 0.6}, discopop_tau=0.6),
    "apo-zero": _one("apo-zero", "apo_zero"),
    "apo-down": _one("apo-down", "apo_down"),
    "sft": Peer({"use": "sft"}, {"loss_types": ["sft"]}),
    "ld-dpo": _one("dpo", "sigmoid", {"ld_alpha": 0.4}, ld_alpha=0.4),
    "ld-dpo of the shared length": _one("dpo", "sigmoid", {"ld_alpha": 0.0}, ld_alpha=0.0),
    "ld-dpo, sorted": _one("aot", "aot", {"ld_alpha": 0.4}, ld_alpha=0.4),
    "ld-dpo, sorted apart": _one("aot-unpaired", "aot_unpaired", {"ld_alpha": 0.4}, ld_alpha=0.4),
    "mpo": Peer(MPO, {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.3}),
    **_divergences(),
}
"""Every loss of TRL's DPO trainer."""


def trl_loss(case: Peer) -> tuple[float, Any]:
    """Return the loss of TRL's trainer and its gradient by the policy's logprobs, as padded rows."""
    from trl import DPOTrainer

    policy = torch.from_numpy(padded("policy")).requires_grad_()
    mask = torch.zeros(2 * len(LENGTHS), PROMPT + max(map(max, LENGTHS)), dtype=torch.long)
    for row, length in enumerate(rows()):
        mask[row, PROMPT : PROMPT + length] = 1
    reference = torch.from_numpy(padded("reference")).to(policy.dtype)
    shift = mask[:, 1:]
    weights = torch.ones_like(shift, dtype=policy.dtype)
    if case.settings.get("ld_alpha") is not None:
        place = shift.cumsum(1)
        shared = torch.tensor([min(pair) for pair in LENGTHS] * 2)[:, None]
        weights = torch.where(place > shared, case.settings["ld_alpha"], 1.0)
    summed = (reference * shift * weights).sum(1)
    ref_chosen, ref_rejected = summed.chunk(2)
    outputs = SimpleNamespace(
        log_probs=policy, entropy=torch.zeros_like(policy), mean_logits=torch.zeros_like(policy),
        is_top1=torch.zeros_like(policy, dtype=torch.bool), log_sum_sq_probs=torch.zeros_like(policy),
    )  # fmt: skip
    gather = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer: Any = SimpleNamespace(
        accelerator=gather, model=SimpleNamespace(training=True), aux_loss_enabled=False, precompute_ref_logps=True,
        use_weighting=False, _tp_size=1, _total_train_tokens=0, ld_alpha=None, beta=0.1, label_smoothing=0.0,
        f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, args=SimpleNamespace(discopop_tau=0.05),
        loss_types=["sigmoid"], loss_weights=[1.0],
    )  # fmt: skip
    for name, value in case.settings.items():
        setattr(trainer.args if name == "discopop_tau" else trainer, name, value)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    class Model:
        def __call__(self, **inputs: Any) -> Any:
            return outputs

    inputs = {
        "input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected,
    }  # fmt: skip
    value = DPOTrainer._compute_loss(trainer, Model(), inputs, False)
    (gradient,) = torch.autograd.grad(value, policy)
    return float(value.detach()), (gradient * shift).numpy()


GAVE: dict[str, tuple[float, float]] = {
    "dpo": (1.4476318, 0.1330858),
    "dpo by token": (0.6912637, 0.0510487),
    "robust-dpo": (1.5212835, 0.1523515),
    "hinge": (1.7672305, 0.1513158),
    "ipo": (5.8349743, 1.508342),
    "exo-pair": (3.1808593, 0.3084654),
    "exo-pair, more smoothing": (0.489117, 0.0976315),
    "nca-pair": (1.9579487, 0.0281355),
    "bco-pair": (2.1625161, 0.0830174),
    "sppo-hard": (63.7850151, 3.2961563),
    "aot": (1.0646329, 0.0930979),
    "aot with label smoothing": (0.9762513, 0.069979),
    "aot-unpaired": (1.0692006, 0.1136619),
    "aot-unpaired with label smoothing": (0.9808188, 0.0905431),
    "discopop": (1.4766153, 0.1262544),
    "discopop, warmer": (1.5468494, 0.1352524),
    "apo-zero": (1.0711797, 0.0277619),
    "apo-down": (1.0143081, 0.0186069),
    "sft": (1.5363578, 0.0632492),
    "ld-dpo": (1.4332939, 0.0858194),
    "ld-dpo of the shared length": (1.4446799, 0.0411295),
    "ld-dpo, sorted": (1.1334364, 0.0215122),
    "ld-dpo, sorted apart": (1.1659819, 0.0241377),
    "mpo": (3.1269665, 0.1863213),
    "dpo, forward-kl": (39.589756, -25.9126948),
    "dpo, jensen-shannon": (0.8728128, 0.0161731),
    "dpo, alpha": (1.7158984, -0.121263),
    "hinge, forward-kl": (40.0048676, -25.9348373),
    "hinge, jensen-shannon": (1.1568776, 0.0478253),
    "hinge, alpha": (1.984352, -0.1030354),
    "ipo, forward-kl": (4290.0556641, -5399.3943052),
    "ipo, jensen-shannon": (3.5276453, 0.8716619),
    "ipo, alpha": (12.8607292, 1.7775902),
    "discopop, forward-kl": (6.9762855, -4.3613901),
    "discopop, jensen-shannon": (0.8495718, 0.0017551),
    "discopop, alpha": (0.9118087, -0.023368),
    "robust-dpo, forward-kl": (44.0841179, -29.0730474),
    "robust-dpo, jensen-shannon": (0.8924225, 0.0221513),
    "robust-dpo, alpha": (1.8120989, -0.127067),
}
"""Value, and gradient in the direction of `DIRECTION`, of TRL's trainer."""
DIRECTION = np.cos(np.arange(padded("policy").size)).reshape(padded("policy").shape)


def test_every_case_has_numbers() -> None:
    assert set(GAVE) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_that_trl_1_16_gave(name: str) -> None:
    value, gradient = computed(CASES[name])
    assert (value, float((gradient * DIRECTION).sum())) == pytest.approx(GAVE[name], rel=2e-5, abs=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_trl_as_it_is_installed(name: str) -> None:
    (ours, gradient), (value, slope) = computed(CASES[name]), trl_loss(CASES[name])
    assert ours == pytest.approx(value, rel=2e-5)
    np.testing.assert_allclose(gradient, slope, rtol=2e-4, atol=2e-6)


def trl_numbers() -> dict[str, tuple[float, float]]:
    """Return what TRL gives, to be recorded above."""
    found = {}
    for name, case in CASES.items():
        value, slope = trl_loss(case)
        found[name] = (round(value, 7), round(float((slope * DIRECTION).sum()), 7))
    return found
