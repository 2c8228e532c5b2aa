"""nn.Dropout with cheap random numbers."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Dropout(nn.Module):
    """In training, set each element to 0 with probability `p` in [0, 1) and scale the others by 1 / (1 - p).

    On the CPU nn.Dropout draws one random number an element, one after the other. Here a draw of 64 bits serves four
    elements, so p is rounded to a multiple of 1/65,536. On other devices it is PyTorch's.
    """

    def __init__(self, p):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout rate is at least 0 and below 1, not {p!r}")
        self.p = p

    def forward(self, x):
        """x: any shape, any floating-point type. Returns the same."""
        if not self.training or self.p == 0 or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        dropped = min(max(1, round(65_536 * self.p)), 65_535)  # of the 65,536 values of 16 bits
        bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        bits.random_(-(2**63), None)  # from the smallest to the largest
        kept = (bits.view(torch.int16)[: x.numel()] >= dropped - 32_768).view(x.shape)
        return x * kept.to(x.dtype).mul_(65_536 / (65_536 - dropped))

    def extra_repr(self):
        return f"p={self.p}"
