"""A stack of transformer blocks for tests of what autograd saves: with attention whose query, key and value are views of one tensor."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for each in self.qkv(self.before_attention(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_linear(x))))


class Stack(nn.Module):
    """recompute: None, or torch's use_reentrant."""

    def __init__(self, width, depth=16, recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


def batch_of(width, batch=8, length=64, seed=0):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def train(model, x, around, steps=3):
    """Losses, and the last step's gradients. around: the context of a forward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with around:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters()]
