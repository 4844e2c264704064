"""
Turns mechanisms on over the weights of a checkpoint that was trained without them (--init_from).

Each starts at its neutral setting, where the model computes what the checkpoint does: `neutral` in its class
says which values its flags and parameters have there. A run that turns nothing on does not load this file.
"""

from fnmatch import fnmatch

import torch

from model import GPT, NEUTRAL, GPTConfig
from nanoheads.checkpoint import build, config_of, load_weights, same_logits, tensor_shapes
from nanoheads.common import UserError
from nanoheads.pruning import scale_heads


# Flags of mechanisms that get no gradient at their neutral setting. They start as in a new model, where they
# are constant factors on the heads' outputs, and the checkpoint's weights are divided by these.
ABSORBED = ("sentinel",)


def mode_of(cls, config):
    """The mode of a mechanism that has the flags of a config, the most specific one; None: no mode has them.
    """
    def fits(mode):
        for key, value in cls.modes[mode].items():
            # names of constraints, or a number of tokens, may be any
            free = key == cls.flag and not isinstance(value, (str, bool))
            if getattr(config, key) != value and not free:
                return False
        return True
    return max(filter(fits, cls.modes), key=lambda mode: len(cls.modes[mode]), default=None)


@torch.no_grad()
def make_neutral(model, names):
    """Set the parameters that these entries of NEUTRAL name. With the entries' flags too the logits are those
    of the plain GPT.
    """
    for pattern, value in (item for name in names for item in NEUTRAL.get(name, {}).items()):
        for name, p in model.named_parameters():
            if fnmatch(name, f"*{pattern}"):
                p.copy_(value(p.shape) if callable(value) else torch.as_tensor(value))


def neutral_flags(cls, config, given):
    """{flag: value} at which a mechanism of this config equals the plain GPT.

    given: {flag: value} of those that were set, which stay. UserError: they leave it no such setting.
    """
    mode, flags = mode_of(cls, config), {}
    if cls.flag in ABSORBED:
        return flags
    what = f"{cls.flag}={given[cls.flag]!r}"
    anyway = "--init_anyway starts it as in a new model"
    if mode not in NEUTRAL:
        raise UserError(f"{what} has no neutral setting, that is, the checkpoint's logits; {anyway}")
    for key, value in NEUTRAL[mode].items():
        if key not in GPTConfig.defaults():
            continue  # a parameter
        flags[key] = getattr(config, value) if isinstance(value, str) else value
        if key in given and getattr(config, key) != flags[key]:
            raise UserError(f"{what} is neutral only with {key}={flags[key]}; {anyway}")
    return flags


def extended(state, path, device, turned_on, anyway, changes):
    """The GPT of a read checkpoint with mechanisms turned on, each at its neutral setting: the same logits.

    turned_on: {class: {flag: value}} of the flags that were set. changes: {flag: value} of other flags.
    anyway: a mechanism without a neutral setting starts as in a new model. UserError: there is one, and no
    anyway.
    """
    classes = list(turned_on)
    given = {key: value for of_class in turned_on.values() for key, value in of_class.items()}
    flags = {**changes, **given}
    config, modes = config_of(state, path, **flags), []
    for cls in classes:
        try:
            flags.update(neutral_flags(cls, config, given))
            modes.append(mode_of(cls, config))
        except UserError as e:
            if not anyway:
                raise UserError(f"{path}: {e}") from None
    try:
        model = GPT(config_of(state, path, **flags))
        missing, unknown = load_weights(model, state["model"], path, strict=False)
        if unknown or set(missing) & set(tensor_shapes(config_of(state, path))):
            raise ValueError(f"no weights for {', '.join([*unknown, *missing][:3])}")
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError) as e:
        names = ", ".join(cls.flag for cls in classes)
        why = " ".join(str(e).split())[:300]
        raise UserError(f"{path}: {names} cannot be turned on over its weights: {why}")
    make_neutral(model, modes)
    for block in model.transformer.h:
        for m in block.attn.mechanisms():
            if m.flag in ABSORBED and type(m) in classes:
                scale_heads(block.attn, 1 / m.gate())
    model.to(device).eval()
    if len(modes) == len(classes) and not same_logits(model, build(state, path, device)):
        raise UserError(f"{path}: with {', '.join(modes)} the model is not the checkpoint's at the start; "
                        "--init_anyway starts it all the same")
    return model
