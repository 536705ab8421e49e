"""What all systems train: a decoder-only transformer over bytes (RoPE, RMSNorm, SwiGLU), and the batches it sees."""

import glob
import os

import torch
from torch.nn import functional as F

VOCABULARY = 256
SEED = 1234


class Linear(torch.nn.Linear):
    def reset_parameters(self) -> None:
        """make_model draws the initial values. The meta device would do as well, but imports torch's compilers for a second."""


class Embedding(torch.nn.Embedding):
    def reset_parameters(self) -> None:
        """As Linear's."""


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021) over the two halves of a head. x: [rows, heads, length, head width]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate_up = Linear(width, 2 * hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Gpt(torch.nn.Module):
    """31 million parameters as it stands."""

    def __init__(self, width: int = 512, layers: int = 10, heads: int = 8, hidden: int = 1344) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = Linear(width, VOCABULARY, bias=False)
        self.head_width = width // heads
        self.deep_std = 0.02 / (2 * layers) ** 0.5

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss. tokens, targets: [rows, length] int64."""
        x = self.embedding(tokens)
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        frequencies = 10000.0 ** -(torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width)
        angles = torch.outer(places, frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_model(dtype: torch.dtype, **sizes: int) -> Gpt:
    """The same values in every process. sizes: Gpt's arguments."""
    model = Gpt(**sizes)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            deep = name.endswith(('out.weight', 'down.weight'))
            bound = 3 ** 0.5 * (model.deep_std if deep else 0.02)  # uniform: half the time of a normal distribution at each start
            torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return model.to(dtype)


class Batches:
    """Draws the global batch of each step: `micro` micro-batches of `rows` rows, the same on all ranks, whatever their number. The
    state of its generator is the data cursor."""

    def __init__(self, micro: int, rows: int, length: int) -> None:
        text = b''.join(open(path, 'rb').read() for path in sorted(glob.glob('/usr/share/common-licenses/*')) if os.path.isfile(path))
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._micro, self._rows, self._length = micro, rows, length
        self.generator = torch.Generator().manual_seed(SEED)

    @property
    def tokens(self) -> int:
        """Of one step, all ranks together."""
        return self._micro * self._rows * self._length

    def next(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, targets), each [rows, length] int64, of every micro-batch."""
        starts = torch.randint(len(self._text) - self._length - 1, (self._micro, self._rows, 1), generator=self.generator)
        rows = self._text[starts + torch.arange(self._length + 1)].long()
        return [(row[:, :-1], row[:, 1:]) for row in rows]

    def state(self) -> bytes:
        return self.generator.get_state().numpy().tobytes()

    def restore(self, state: bytes) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
