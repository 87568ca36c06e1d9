"""Small tokenizers of the two kinds that GGUF files hold, with 320 tokens, for models of tests."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
TEXT = "the theory of other 1969 1970 words it's the others' \n\n   café, a list of the words of the theory"
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def save_byte_level(folder: Path, pattern: str = QWEN_WORDS) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the splitting rule of Qwen2, or another one."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=["<|endoftext|>", "<|user|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return _saved(tokenizer, folder, "<|endoftext|>", "<|end|>")


def save_sentencepiece(folder: Path, leading_space: bool = True) -> PreTrainedTokenizerFast:
    """BPE that falls back to bytes, as SentencePiece files become in tokenizer.json; it begins texts with <s>."""
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: index for index, token in enumerate([*special, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("o", "f"), ("▁", "of"), ("▁", "w")):
        for token in (left, right, left + right):
            vocabulary.setdefault(token, len(vocabulary))
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if leading_space else spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<tool>▁", normalized=False), AddedToken("<|user|>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _saved(tokenizer, folder, "<s>", "</s>", unk_token="<unk>", pad_token="</s>")


def _saved(tokenizer: Tokenizer, folder: Path, bos: str, eos: str, **roles: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, **roles)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast
