"""What both trainings share: AdamW, and a learning rate that climbs, stays and falls."""

import torch


def make_optimizer(parameters, weight_decay, decays=lambda name, p: p.dim() >= 2, **options):
    """AdamW over (name, parameter) pairs, on the device where they are.

    decays: whether a parameter shrinks by weight_decay; by default matrices do, biases and the scales of norms don't.
    options: AdamW's own, such as lr, betas, eps.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for name, p in parameters if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters if not decays(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, fused=parameters[0][1].device.type != "mps", **options)


def learning_rate(peak, done, total, warmup, decay):
    """The rate after `done` of `total` steps or tokens: up over `warmup`, then `peak`, then down to 0 over `decay`."""
    up = done / warmup if warmup else 1.0
    down = (total - done) / decay if decay else 1.0
    return peak * max(0.0, min(1.0, up, down))
