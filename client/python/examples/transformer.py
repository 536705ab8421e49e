"""What the examples of parallel training train: a small causal language model, made on the meta device, on text that can be learned."""
import torch
from torch import nn

VOCABULARY, WIDTH, HEAD_WIDTH, BLOCKS = 64, 32, 8, 4


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = MLP()

    def forward(self, x):
        normed = self.before_attention(x)
        # As many heads as there are here: with tensor parallelism a rank has some of them.
        heads = [linear(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for linear in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def on_meta():
    """Shapes without values or memory: the state servers will have the values."""
    with torch.device('meta'):
        return Transformer()


def batch(step, part, size=8, length=16):
    """Tokens [size, length + 1] that count upwards from random ones. part: the data-parallel rank, which has rows of its own."""
    starts = torch.randint(VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(1000 * step + part))
    return (starts + torch.arange(length + 1)) % VOCABULARY


def loss_of(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
