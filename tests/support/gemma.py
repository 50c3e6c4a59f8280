"""A tiny Gemma 3 with all that sets the family apart, and a tokenizer like the one that multimodal Gemmas publish.

The model: query and key norms, norms before and behind attention and MLP whose gain is 1 + weight, GELU by tanh, a
sliding window in two of three layers, a rope of its own for each kind of layer, heads wider than hidden / heads, and
embeddings that are scaled, and tied to the head.

The tokenizer: pieces of a BPE that falls back to bytes, more added tokens than pieces, and one more behind them all,
for which the model has no logit.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AddedToken,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaTokenizer,
    GenerationConfig,
)

from draftsmith.train.runs import save_model

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
TURN_BEGINS, TURN_ENDS = "<start_of_turn>", "<end_of_turn>"
MULTIMODAL, IMAGE = "[multimodal]", "<image_soft_token>"
UNUSED = 99
"""Added tokens before the turns' own, as Gemma has; as many again stand behind the pieces."""
PIECES = 110
TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "for i in range(10):\n    print(i, i * i)\n",
    "import os\n\nprint(os.getcwd())\n",
    "user model # x = [1, 2]\n",
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (m['content'] | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def gemma_tokenizer(texts: Sequence[str] = TEXTS, *, chat: bool = True, image: bool = True) -> GemmaTokenizer:
    """Train Gemma's kind of tokenizer on texts.

    Args:
        texts: what its pieces are learnt from.
        chat: give it Gemma's chat template.
        image: give it the token beyond the vocabulary.
    """
    vocabulary, merges = _pieces(tuple(texts))
    tokenizer = GemmaTokenizer(vocab=dict(vocabulary), merges=list(merges))
    added = [token for token in vocabulary if token.startswith(("<unused", TURN_BEGINS, TURN_ENDS))]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True)
    tokenizer.add_tokens([AddedToken(MULTIMODAL, normalized=False)])  # one that is added, and not special
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    if image:
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


@lru_cache
def _pieces(texts: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary, in Gemma's order, and the merges."""
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    learnt.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=PIECES, max_token_length=8, show_progress=False))
    pieces = sorted(learnt.get_vocab(), key=learnt.get_vocab().__getitem__)
    unused = [f"<unused{number}>" for number in range(2 * UNUSED)]
    order = [*SPECIAL, MULTIMODAL, *unused[:UNUSED], TURN_BEGINS, TURN_ENDS]
    order += [f"<0x{byte:02X}>" for byte in range(256)]
    order += [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]
    order += unused[UNUSED:]
    made = set(pieces)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if {piece[:cut], piece[cut:]} <= made
    ]
    return {token: number for number, token in enumerate(order)}, merges


def vocabulary_size() -> int:
    """Return how many logits the model has: one fewer than its tokenizer has tokens."""
    return len(gemma_tokenizer(image=False))


def tiny_gemma(seed: int = 0, layers: int = 3, scale: float = 4.0, **config: object) -> Gemma3ForCausalLM:
    """A random Gemma 3 whose logits have the standard deviation `scale`; every weight matters, those of norms too."""
    size = vocabulary_size()
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {
        "vocab_size": size,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "layer_types": [kinds[i % 3] for i in range(layers)],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "intermediate_size": 48,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**tokens | shape | config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    embeddings = model.get_input_embeddings().weight
    embeddings.mul_(0.25)  # or a token would carry itself through the residual stream to the head that it is tied to
    gain = scale / float(embeddings.std() * embeddings.shape[1] ** 0.5)
    model.model.norm.weight.copy_((1 + model.model.norm.weight) * gain - 1)
    turn_ends = gemma_tokenizer(image=False).convert_tokens_to_ids(TURN_ENDS)
    model.generation_config = GenerationConfig(**tokens | {"eos_token_id": [1, turn_ends]})
    return model


def seeing_gemma(text: Gemma3ForCausalLM) -> Gemma3ForConditionalGeneration:
    """Return the multimodal class of Gemma 3, with the weights of a text model and a random vision tower."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**vision, "image_size": 4, "patch_size": 2},
        mm_tokens_per_image=4,
        image_token_index=text.config.vocab_size - 1,
    )
    model = Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config = text.generation_config
    return model


def save_gemma(directory: Path, tokenizer: GemmaTokenizer | None = None, **options: object) -> Path:
    """Write a tiny Gemma 3 (`tiny_gemma`) beside a tokenizer, the one with a token too many by default."""
    save_model(tiny_gemma(**options), tokenizer or gemma_tokenizer(), directory)
    return directory
