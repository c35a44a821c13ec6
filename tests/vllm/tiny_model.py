"""Makes a tiny Llama with random weights and a tokenizer of its own; run by the Python that has vLLM.

python tiny_model.py DIRECTORY
"""

from __future__ import annotations

import sys

VOCABULARY = 1024
END, PAD = "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
)
TEXT = [
    "A router sends each request to the worker that can answer it soonest.",
    "The key value cache of a prompt is kept in blocks of a few tokens.",
    "One worker reads the prompt, another one writes the answer.",
    "The quick brown fox jumps over the lazy dog, again and again.",
]


def main(directory: str) -> None:
    """Write model and tokenizer into *directory*."""
    # Only the Python that has vLLM has them.
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    special = [END, PAD, "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
