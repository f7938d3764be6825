"""A vocabulary as GGUF files have it: bytes, a few merges, control tokens."""

from tokenizers import pre_tokenizers

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "Ġ Ġ"]
    tokens = [*SPECIALS, *alphabet, *(m.replace(" ", "") for m in merges), "<think>"]
    kinds = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - 1) + [4]
    return tokens, merges, kinds
