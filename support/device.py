"""What is computed on, and in which number format."""

import torch

from support.files import first_line


def pick_device(name):
    """The torch device of a name; "auto" takes cuda, else mps, else cpu. Raises ValueError for one that isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # torch's random state and clocks are those of the current one
        (torch.zeros(1, device=device) + 1).item()  # some devices exist by name only
        return device
    except Exception as error:  # each back end has its own
        raise ValueError(f"DEVICE={name} can't be used: {first_line(error)}") from None


def has_bfloat16(device):
    """Whether bfloat16 arithmetic is in the hardware; emulated, it is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def pick_precision(name, device):
    """The number format of training on a device, "float32" or "bfloat16"; "auto" is that where hardware has it."""
    if name == "auto":
        return "bfloat16" if has_bfloat16(device) else "float32"
    return name


def autocast(device, precision):
    """A context in which matrix products are computed in the format; weights, gradients and norms stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def random_source(device):
    """The module whose get_rng_state and set_rng_state govern the dropout masks on a device."""
    return torch if device.type == "cpu" else torch.get_device_module(device)
