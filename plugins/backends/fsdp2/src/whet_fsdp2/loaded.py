"""Checks of what `transformers` has made of a model folder, and of what it reports of the weights."""

from typing import Any

from whet.data.model_info import ModelInfo
from whet.errors import WhetError
from whet_training.left_out import check_left_out


def check_loaded(info: ModelInfo, model: Any, report: Any, head: str, *, aloud: bool) -> None:
    """Warn of weights that the model has no place for, if `aloud`.

    Raises `WhetError` if weights are missing or of another shape, are still quantised, or show that config.json is that
    of another model.
    """
    _refuse_incomplete(info.path, report)
    _refuse_quantised(info.path, model)
    body, left_out = f"{model.base_model_prefix}.", set(report.get("unexpected_keys") or ())
    if head == "value":  # it takes the place of the head that is stored
        left_out = {name for name in left_out if name.startswith(body)}
    known = [name for name, _ in model.named_parameters()]
    check_left_out(info.path, left_out, known, info.config, type(model).__name__, aloud=aloud)


def _refuse_quantised(path: str, model: Any) -> None:
    settings = (model.config, model.config.get_text_config())
    stated = next(filter(None, (getattr(one, "quantization_config", None) for one in settings)), None)
    codes = [name for name, parameter in model.named_parameters() if not parameter.is_floating_point()]
    if stated is not None or codes:
        told = stated if isinstance(stated, dict) else getattr(stated, "to_dict", dict)()
        kind = told.get("quant_method", "")
        words = f"by {getattr(kind, 'value', kind)}" if kind else f"such as {codes[0]}" if codes else "by config.json"
        raise WhetError(
            f"model.path: the weights in {path} are still quantised once they are loaded, {words}, and such numbers "
            "cannot be trained; give a folder of weights in float32 or bfloat16, e.g. of the model before quantisation"
        )


def _refuse_incomplete(path: str, report: Any) -> None:
    for kind, words in (
        ("missing_keys", "lack"),
        ("mismatched_keys", "hold in another shape"),
        ("error_msgs", "cannot give"),
    ):
        found = report.get(kind) or ()
        names = sorted(str(item[0]) if isinstance(item, tuple) else str(item) for item in found)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WhetError(
                f"model.path: the weights in {path} {words} {', '.join(names[:3])}{more}; "
                "is the download complete, and is config.json that of these weights?"
            )
