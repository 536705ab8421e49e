"""What the examples train: a small Llama-style causal language model made from a configuration, on text that can be learned."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256


def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                                        num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=True))


def make_dataset(size=512, length=32):
    """Sequences that count upwards from a random token."""
    starts = torch.randint(VOCABULARY, (size, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(length)) % VOCABULARY
    return [{'input_ids': row, 'labels': row} for row in tokens]


def make_tokenizer():
    """Of numbers, for trainers that want one."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token='0'))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token='0', pad_token='0', eos_token='1')
