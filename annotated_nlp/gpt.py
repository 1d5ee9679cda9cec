"""GPT draft."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .checkpoints import Layout, Pretrained
from .decoding import greedy, sample
from .transformer import BlockCache, BlockConfig, Positions, Stack, check_ids, initialise_normal


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """A decoder without memory; sizes not given are those of the smallest GPT-2.

    `d_ff` is 4 d_model if not given. With `prefix_lm` the tokens of a prefix see each other in both
    directions. `n_classes` is for `GPTForSequenceClassification`. Raises ValueError for settings that
    don't fit.
    """

    vocab_size: int = 50_257
    max_len: int = 1024
    d_model: int = 768
    n_heads: int = 12
    d_ff: int | None = None
    n_layers: int = 12
    norm_first: bool = True
    activation: str = "gelu_tanh"
    prefix_lm: bool = False
    n_classes: int = 2

    def __post_init__(self):
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)  # the dataclass is frozen
        super().__post_init__()
        for name in ("vocab_size", "max_len", "n_layers", "n_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @classmethod
    def gpt1(cls, **changes) -> "GPTConfig":
        """Radford et al. 2018, section 4.1: post-norm, 117M parameters."""
        return cls(**dict(vocab_size=40_478, max_len=512, norm_first=False) | changes)

    @classmethod
    def gpt2(cls, size: str = "small", **changes) -> "GPTConfig":
        """Radford et al. 2019, table 2: "small", "medium", "large" or "xl"."""
        d_model, n_layers, n_heads = _size(size, GPT2_SIZES)
        return cls(**dict(d_model=d_model, n_layers=n_layers, n_heads=n_heads) | changes)

    @classmethod
    def gpt3(cls, size: str = "175B", **changes) -> "GPTConfig":
        """Brown et al. 2020, table 2.1, by parameters: "125M", "350M", ..., "175B"; all layers dense."""
        d_model, n_layers, n_heads, d_head = _size(size, GPT3_SIZES)
        return cls(**dict(d_model=d_model, n_layers=n_layers, n_heads=n_heads, d_head=d_head, max_len=2048) | changes)


# d_model, layers, heads
GPT2_SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}
# d_model, layers, heads, width of a head, as printed: their product isn't d_model at 1.3B and 13B
GPT3_SIZES = {
    "125M": (768, 12, 12, 64), "350M": (1024, 24, 16, 64), "760M": (1536, 24, 16, 96), "1.3B": (2048, 24, 24, 128),
    "2.7B": (2560, 32, 32, 80), "6.7B": (4096, 32, 32, 128), "13B": (5140, 40, 40, 128), "175B": (12288, 96, 96, 128),
}


def _size(size: str, sizes: dict) -> tuple[int, ...]:
    if size not in sizes:
        raise ValueError(f"size={size!r} must be one of {', '.join(map(repr, sizes))}")
    return sizes[size]


def prefix_mask(prefix: Int[Tensor, "b"], n: int) -> Bool[Tensor, "b n n"]:
    """True where query i may see key j: among the first `prefix` tokens of a row, or not after i.

    Raffel et al. 2020, section 3.2.1 and figure 4.
    """
    place = torch.arange(n, device=prefix.device)
    causal = rearrange(place, "i -> i 1") >= place
    return causal | (place < rearrange(prefix, "b -> b 1 1"))


@dataclass(frozen=True)
class GPTState:
    """What the model remembers of `length` tokens; `padding` counts those of each row that are none."""

    caches: tuple[BlockCache, ...]
    length: int
    padding: Int[Tensor, "b"] | None

    def reorder(self, index: Int[Tensor, "r"]) -> "GPTState":
        """The state whose row i is this one's row index[i]."""
        caches = tuple(cache.reorder(index) for cache in self.caches)
        padding = None if self.padding is None else self.padding.index_select(0, index)
        return GPTState(caches, self.length, padding)


class GPT(Pretrained, nn.Module):
    """A language model of blocks: the next token from those before it.

    Radford et al. 2018, 2019; Brown et al. 2020. Input and output share the token embedding. Raises
    ValueError for wrong shapes and dtypes, an empty batch, more than `max_len` tokens, and on the CPU for ids
    outside the vocabulary.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        c = self.config = config
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = Positions("learned", c.max_len, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.stack = Stack(c, c.n_layers, causal=not c.prefix_lm)
        self.initialise(self)
        for block in self.stack.blocks:  # 2 n_layers sums on the way through: Radford et al. 2019, section 2.3
            for layer in (block.attention.f.out, block.feed_forward.f.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * c.n_layers))

    initialise = staticmethod(initialise_normal)

    def forward(
        self, ids: Int[Tensor, "b n"], prefix: Int[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b n v"]:
        """Logits for the token after each of `ids`. Padding must stand at the end, where no token sees it.

        `prefix` counts the tokens of each row that see each other both ways (`prefix_lm`; 0 if not given).
        """
        return self.logits(self.states(ids, prefix))

    def states(
        self, ids: Int[Tensor, "b n"], prefix: Int[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """What the last block gives. Arguments as in `forward`."""
        check_ids("ids", ids, self.config.vocab_size)
        return self.stack(self._embed(ids, 0), self._mask(ids, prefix))

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """The dot product of each state with each token's vector."""
        return F.linear(x, self.tokens.weight)

    @torch.no_grad()
    def start(
        self, ids: Int[Tensor, "b n"], padding: Int[Tensor, "b"] | None = None, max_len: int | None = None
    ) -> GPTState:
        """Read the beginning of a text, `n` may be 0; room for `max_len` tokens (the model's if not given).

        `padding` counts the columns at the left of each row that are no tokens. With `prefix_lm` what is read
        here is the prefix. Call `eval()` first, or dropout acts.
        """
        max_len = self.config.max_len if max_len is None else max_len
        caches = self.stack.new_caches(len(ids), max_len)
        state = GPTState(caches, 0, padding)
        return self._read(ids, state)[1] if ids.shape[1] else state

    @torch.no_grad()
    def step(self, ids: Int[Tensor, "b"], state: GPTState) -> tuple[Float[Tensor, "b v"], GPTState]:
        """Consume one token a row: the next token's logits, and the state after it.

        Writes into the state's caches: use each state once, or reorder it for a copy.
        """
        x, state = self._read(rearrange(ids, "b -> b 1"), state)
        return self.logits(x[:, 0]), state

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "b n"],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_id: int | None = None,
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "b n+new"]:
        """Continue each row of `ids`: the prompts as they came, and up to `max_new_tokens` more.

        Temperature 0 takes the most probable token, otherwise one is drawn as by `decoding.sample`. `mask` is
        True at the tokens of prompts of different lengths. A row that has written `stop_id` is filled with
        it. Dropout is off. Without `stop_id` nothing waits for the device. Raises ValueError for a prompt
        without tokens, or more tokens than the model has places for.
        """
        prompt, padding = self._prompt(ids, mask, max_new_tokens)
        rules = dict(max_new_tokens=max_new_tokens, stop_id=stop_id, pad_id=stop_id or 0)
        training = self.training
        self.eval()
        try:
            state = self.start(prompt[:, :-1], padding, prompt.shape[1] - 1 + max_new_tokens)
            if temperature == 0:
                new = greedy(self.step, state, prompt[:, -1], **rules)
            else:
                cuts = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                new = sample(self.step, state, prompt[:, -1], **rules, **cuts)
        finally:
            self.train(training)
        return torch.cat([ids, new.ids], dim=1)

    def _embed(self, ids: Tensor, start: int | Tensor) -> Tensor:
        return self.dropout(self.positions(self.tokens(ids), start))

    def _mask(self, ids: Tensor, prefix: Tensor | None) -> Tensor | None:
        if not self.config.prefix_lm:
            if prefix is not None:
                raise ValueError("prefix is given, but this model reads from left to right: make it with prefix_lm=True")
            return None
        prefix = ids.new_zeros(len(ids)) if prefix is None else prefix
        if prefix.shape != ids.shape[:1] or prefix.is_floating_point():
            raise ValueError(f"prefix is {prefix.dtype} of shape {tuple(prefix.shape)}; it must count tokens, one number "
                             f"for each of {len(ids)} rows")
        return prefix_mask(prefix, ids.shape[1])

    def _read(self, ids: Tensor, state: GPTState) -> tuple[Tensor, GPTState]:
        "States of the tokens, at the columns from the state's length on."
        check_ids("ids", ids, self.config.vocab_size, rows=len(state.caches[0].own.k))
        stop, padding = state.length + ids.shape[1], state.padding
        start, mask = state.length, None
        if padding is not None:
            padding = rearrange(padding, "b -> b 1")
            start, mask = start - state.padding, torch.arange(stop, device=ids.device) >= padding
        x = self.stack(self._embed(ids, start), mask, caches=state.caches, start=state.length)
        return x, replace(state, length=stop)

    def _prompt(self, ids: Tensor, mask: Tensor | None, new: int) -> tuple[Tensor, Tensor | None]:
        "The prompts with their padding to the left, and how much of it each has."
        check_ids("ids", ids, self.config.vocab_size)
        n, room = ids.shape[1], self.config.max_len
        if n - 1 + new > room:  # the last token is written and not read
            raise ValueError(
                f"a prompt of {n} tokens and max_new_tokens={new} need {n - 1 + new} places, the model has "
                f"max_len={room}: shorten the prompt, or ask for fewer"
            )
        if mask is None:
            return ids, None
        if mask.shape != ids.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be boolean, True at tokens, with "
                f"ids' shape {tuple(ids.shape)}"
            )
        padding = (~mask).sum(1)
        most = int(padding.max())
        if most == n:
            raise ValueError(f"row {int(padding.argmax())} of mask has no token: a prompt needs at least one")
        order = mask.int().argsort(dim=1, stable=True)  # what is no token first, all else as it was
        return ids.gather(1, order), padding if most else None


class GPTForSequenceClassification(Pretrained, nn.Module):
    """GPT, and a linear layer on the state of a text's last token. Radford et al. 2018, section 3.2."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.gpt = config, GPT(config)
        self.score = nn.Linear(config.d_model, config.n_classes, bias=False)
        self.initialise(self.score)

    initialise = staticmethod(initialise_normal)

    def forward(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b c"]:
        """Logits of the classes. `mask` is True at tokens; padding must stand at the end."""
        return self.classify(self.gpt.states(ids), mask)

    def classify(self, states: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b c"]:
        """From the states of the trunk: `gpt.logits` of the same states gives the language model beside it."""
        b, n, _ = states.shape
        last = states.new_full((b,), n - 1, dtype=torch.long) if mask is None else mask.sum(1) - 1
        return self.score(states[torch.arange(b, device=states.device), last])


# Our modules, and their names in GPT-2's files, where matrices stand turned.
_BLOCKS = {
    "stack.blocks.*.attention.norm": "h.*.ln_1",
    "stack.blocks.*.attention.f.qkv": "h.*.attn.c_attn^T",
    "stack.blocks.*.attention.f.out": "h.*.attn.c_proj^T",
    "stack.blocks.*.feed_forward.norm": "h.*.ln_2",
    "stack.blocks.*.feed_forward.f.up": "h.*.mlp.c_fc^T",
    "stack.blocks.*.feed_forward.f.down": "h.*.mlp.c_proj^T",
}
_GPT2 = {"tokens": "wte", "positions.table": "wpe.weight", "stack.norm": "ln_f"} | _BLOCKS
_GPT1 = {"tokens": "tokens_embed", "positions.table": "positions_embed.weight"} | _BLOCKS
_SETTINGS = {
    "vocab_size": "vocab_size",
    "max_len": "n_positions",
    "d_model": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "dropout": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "eps": "layer_norm_epsilon",
}
_OLD_BUFFERS = ("h.*.attn.bias", "h.*.attn.masked_bias")  # causal masks, kept as tensors by old versions


def _gpt2(architecture: str, names: dict[str, str], **more) -> Layout:
    return Layout(
        architecture, "gpt2", GPTConfig.gpt2,
        settings=_SETTINGS | {"d_ff": "n_inner", "activation": "activation_function"},
        values={"activation": {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "gelu": ("gelu",), "relu": ("relu",)}},
        expects={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        writes={"bos_token_id": None, "eos_token_id": None},  # which token ends a text, the tokenizer knows
        names=names, base="transformer.", ignored=_OLD_BUFFERS, **more,
    )


def _gpt1(architecture: str, names: dict[str, str], **more) -> Layout:
    return Layout(
        architecture, "openai-gpt", GPTConfig.gpt1,
        settings=_SETTINGS | {"activation": "afn"},
        values={"activation": {"gelu_tanh": ("gelu",), "relu": ("relu",)}},  # their "gelu" is the tanh form
        expects={"tie_word_embeddings": True},
        names=names, base="transformer.", ignored=_OLD_BUFFERS, **more,
    )


def _below(ours: str, theirs: str, names: dict[str, str]) -> dict[str, str]:
    return {ours + name: theirs + place for name, place in names.items()}


GPT.layouts = (
    _gpt2("GPT2LMHeadModel", _below("", "transformer.", _GPT2), tied={"lm_head.weight": "transformer.wte.weight"}),
    _gpt1("OpenAIGPTLMHeadModel", _below("", "transformer.", _GPT1), tied={"lm_head.weight": "transformer.tokens_embed.weight"}),
)
GPTForSequenceClassification.layouts = (
    _gpt2("GPT2ForSequenceClassification", _below("gpt.", "transformer.", _GPT2) | {"score": "score"}),
    _gpt1("OpenAIGPTForSequenceClassification", _below("gpt.", "transformer.", _GPT1) | {"score": "score"}),
)
