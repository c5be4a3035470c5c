"""A layer of Mamba-2 with the scan of mamba_ssm, for pytorch.py: what its users train with.

The convolution of four taps, the gate and the norm are left to torch.compile, which fuses them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ssd import mamba_chunk_scan_combined

HEAD, STATE, TAPS, CHUNK = 64, 128, 4, 256

# Triton's own kernels; nothing for the compiler to fuse.
scan = torch.compiler.disable(mamba_chunk_scan_combined)


class MambaLayer(nn.Module):
    """One group of B and C; the sizes of the models that mamba_ssm's authors published."""

    def __init__(self, shape):
        super().__init__()
        self.inner = 2 * shape.hidden
        self.heads = self.inner // HEAD
        self.channels = self.inner + 2 * STATE
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.in_proj = nn.Linear(shape.hidden, self.inner + self.channels + self.heads, bias=False)
        self.conv = nn.Parameter(torch.empty(self.channels, TAPS))
        self.conv_bias = nn.Parameter(torch.empty(self.channels))
        self.dt_bias, self.a_log, self.d = (nn.Parameter(torch.empty(self.heads)) for _ in range(3))
        self.gated_norm = nn.RMSNorm(self.inner, eps=1e-5)
        self.out_proj = nn.Linear(self.inner, shape.hidden, bias=False)

    def convolve(self, x):
        padded = F.pad(x, (0, 0, TAPS - 1, 0))
        weight = self.conv.to(x.dtype)
        y = self.conv_bias.to(x.dtype)
        for tap in range(TAPS):
            y = y + padded[:, tap:tap + x.shape[1]] * weight[:, tap]
        return F.silu(y)

    def forward(self, x, _):
        batch, sequence, _ = x.shape
        z, mixed, dt = self.in_proj(self.norm(x)).split((self.inner, self.channels, self.heads), -1)
        u, b, c = self.convolve(mixed).split((self.inner, STATE, STATE), -1)
        y = scan(u.view(batch, sequence, self.heads, HEAD), dt, -self.a_log.exp(), b.unsqueeze(2), c.unsqueeze(2),
                 CHUNK, D=self.d, dt_bias=self.dt_bias, dt_softplus=True)
        y = y.reshape(batch, sequence, self.inner)
        return x + self.out_proj(self.gated_norm(y * F.silu(z)).to(x.dtype))
