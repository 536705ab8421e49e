"""The six kinds of model that drop-in use is tested with, small, from configurations alone, a batch for each, and what they are
compared with."""
import copy
import os

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

VOCABULARY = 64


class Classifier(nn.Module):
    """Speaks as transformers' models do: (inputs, labels) -> an object with a loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        logits = self.net(inputs.to(next(self.net.parameters()).dtype)).float()
        return type('Output', (), {'loss': nn.functional.cross_entropy(logits, labels)})


def mlp():
    return Classifier(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))


def cnn():
    return Classifier(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, bias=False), nn.GELU(),
                                    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def llama_tied():
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                        tie_word_embeddings=True))


def moe():
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                                            num_experts_per_tok=2, max_position_embeddings=32))


def lora_gpt2():
    return get_peft_model(gpt2(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=['c_attn'],
                                             fan_in_fan_out=True, task_type='CAUSAL_LM'))


MODELS = {'mlp': mlp, 'cnn': cnn, 'gpt2': gpt2, 'llama_tied': llama_tied, 'moe': moe, 'lora_gpt2': lora_gpt2}


def batch(name, i):
    generator = torch.Generator().manual_seed(1000 + i)
    if name == 'mlp':
        inputs = torch.randn(16, 16, generator=generator)
        return {'inputs': inputs, 'labels': inputs[:, :4].argmax(1)}
    if name == 'cnn':  # which quarter is bright
        inputs, labels = torch.randn(16, 1, 12, 12, generator=generator), torch.randint(4, (16,), generator=generator)
        for image, label in zip(inputs, labels):
            image[0, 6 * (label // 2):6 * (label // 2) + 6, 6 * (label % 2):6 * (label % 2) + 6] += 2
        return {'inputs': inputs, 'labels': labels}
    # Text that can be learned: runs upwards from a random start.
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    tokens = (start + torch.arange(16)) % VOCABULARY
    return {'input_ids': tokens, 'labels': tokens}


# Fewer in CI, where six models are trained many times over; an adapter learns late.
STEPS, OF_AN_ADAPTER = (50, 50) if os.environ.get('TEST_ROUNDS') == 'full' else (12, 20)


def train(name, model, optimizer, steps=None, batches=batch):
    losses = []
    for i in range(steps or (OF_AN_ADAPTER if 'lora' in name else STEPS)):
        optimizer.zero_grad()
        loss = model(**batches(name, i)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ARGUMENTS = {'lr': 3e-3, 'weight_decay': 0.05}
# Of each loss, relative and absolute. fp32: the update itself is as exact as torch's (one rounding per operation in both), but they
# round differently, and 50 steps of training amplify last bits. bf16 working copies: against OverMasters.
TOLERANCES = {torch.float32: {'rtol': 1e-3, 'atol': 1e-4}, torch.bfloat16: {'rtol': 2e-2, 'atol': 2e-2}}


class OverMasters:
    """What users write by hand for bf16 models: torch's AdamW over fp32 copies."""

    def __init__(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, **ARGUMENTS)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for master, p in zip(self.masters, self.parameters):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for master, p in zip(self.masters, self.parameters):
            p.copy_(master)


def compare(name, dtype, ours, wrap=lambda model: model, batches=batch):
    """Losses of 50 steps: (torch's, ours). `ours`: the model's optimizer. `wrap`: as DistributedDataParallel."""
    model = MODELS[name]().to(dtype)
    twin = wrap(copy.deepcopy(model))
    model = wrap(model)
    theirs = OverMasters(twin) if dtype == torch.bfloat16 else torch.optim.AdamW(twin.parameters(), **ARGUMENTS)
    expected = train(name, twin, theirs, batches=batches)
    optimizer = ours(model)
    came = train(name, model, optimizer, batches=batches)
    optimizer.close()
    return torch.tensor(expected), torch.tensor(came)


def check(dtype, expected, came):
    torch.testing.assert_close(came, expected, **TOLERANCES[dtype])
    assert expected[-5:].mean() < expected[:5].mean()
