"""BERT draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .checkpoints import Layout, Pretrained
from .transformer import ACTIVATIONS, NORMS, BlockConfig, Positions, Stack, check_ids, initialise_normal


@dataclass(frozen=True, kw_only=True)
class BertConfig(BlockConfig):
    """An encoder with segments; sizes not given are BERT-base's (Devlin et al. 2019, section 3).

    `n_segments` kinds of segment, `n_classes` for the classifiers. Raises ValueError for settings that
    don't fit.
    """

    vocab_size: int = 30_522
    max_len: int = 512
    d_model: int = 768
    n_heads: int = 12
    d_ff: int = 3072
    n_layers: int = 12
    n_segments: int = 2
    activation: str = "gelu"
    eps: float = 1e-12
    n_classes: int = 2

    def __post_init__(self):
        super().__post_init__()
        for name in ("vocab_size", "max_len", "n_layers", "n_segments", "n_classes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @classmethod
    def base(cls, **changes) -> "BertConfig":
        """12 layers of width 768: 110M parameters."""
        return cls(**changes)

    @classmethod
    def large(cls, **changes) -> "BertConfig":
        """24 layers of width 1024: 340M parameters."""
        return cls(**dict(d_model=1024, n_heads=16, d_ff=4096, n_layers=24) | changes)


class BertEmbedding(nn.Module):
    """The sum of three vectors, for the piece, its segment and its place, normed (section 3, figure 2)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        c = config
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.segments = nn.Embedding(c.n_segments, c.d_model)
        self.positions = Positions("learned", c.max_len, c.d_model)
        self.norm = NORMS[c.norm](c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self, ids: Int[Tensor, "b n"], segments: Int[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n d"]:
        """Vectors of the pieces; all in segment 0 if `segments` is not given."""
        segments = torch.zeros_like(ids) if segments is None else segments
        x = self.tokens(ids) + self.segments(segments)
        return self.dropout(self.norm(self.positions(x)))


class Pooler(nn.Module):
    """tanh(W x + b) of the first piece's state: what BERT calls C, the text as one vector."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)

    def forward(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b d"]:
        """Each row's vector."""
        return self.dense(states[:, 0]).tanh()


class Bert(Pretrained, nn.Module):
    """Pieces to states that have seen both sides (Devlin et al. 2019, section 3).

    `pooler=False` leaves out the pooler. `ids` are pieces with [CLS] first; `segments` says which sentence
    each belongs to (0 if not given); `mask` is True at real pieces (all if not given). Raises ValueError for
    wrong shapes and dtypes, an empty batch, more than `max_len` pieces, and on the CPU for ids outside the
    vocabulary.
    """

    def __init__(self, config: BertConfig, *, pooler: bool = True):
        super().__init__()
        self.config = config
        self.embedding = BertEmbedding(config)
        self.stack = Stack(config, config.n_layers)
        self.pooler = Pooler(config) if pooler else None
        self.initialise(self)

    initialise = staticmethod(initialise_normal)

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """The state of each piece."""
        check_ids("ids", ids, self.config.vocab_size)
        if segments is not None:
            check_ids("segments", segments, self.config.n_segments, rows=len(ids))
        return self.stack(self.embedding(ids, segments), mask)


class MaskedLMHead(nn.Module):
    """A dense layer, GELU and a norm; then each state is compared with all pieces' vectors."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = NORMS[config.norm](config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self, states: Float[Tensor, "*b d"], pieces: Float[Tensor, "v d"]
    ) -> Float[Tensor, "*b v"]:
        """Logits; `pieces` is the embedding's matrix, which input and output share."""
        return F.linear(self.norm(self.activation(self.dense(states))), pieces, self.bias)


class _OnBert(Pretrained, nn.Module):
    "A BERT, and on it what a subclass needs."

    initialise = staticmethod(initialise_normal)

    def __init__(self, config: BertConfig, *, pooler: bool, **heads: nn.Module):
        super().__init__()
        self.config, self.bert = config, Bert(config, pooler=pooler)
        self.dropout = nn.Dropout(config.dropout)
        for name, head in heads.items():
            self.initialise(head)
            self.add_module(name, head)


class BertForPreTraining(_OnBert):
    """Both of BERT's tasks: the masked pieces, and whether the second sentence follows the first (section 3.1)."""

    def __init__(self, config: BertConfig):
        super().__init__(config, pooler=True, mlm=MaskedLMHead(config), nsp=nn.Linear(config.d_model, 2))

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n v"], Float[Tensor, "b 2"]]:
        """Logits of the pieces, and of "follows" (0) against "comes from elsewhere" (1)."""
        states = self.bert(ids, segments, mask)
        return self.pieces(states), self.follows(states)

    def pieces(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Logits of the pieces; for training, of the states at the chosen places alone."""
        return self.mlm(states, self.bert.embedding.tokens.weight)

    def follows(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b 2"]:
        """Logits of "follows" and "comes from elsewhere"."""
        return self.nsp(self.bert.pooler(states))


class BertForMaskedLM(_OnBert):
    """The pieces under the masks."""

    def __init__(self, config: BertConfig):
        super().__init__(config, pooler=False, mlm=MaskedLMHead(config))

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n v"]:
        """Logits of the pieces."""
        return self.pieces(self.bert(ids, segments, mask))

    def pieces(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Logits of the pieces; for training, of the states at the chosen places alone."""
        return self.mlm(states, self.bert.embedding.tokens.weight)


class BertForSequenceClassification(_OnBert):
    """One of `n_classes` for a text or a pair of texts (section 4.1)."""

    def __init__(self, config: BertConfig):
        super().__init__(config, pooler=True, classifier=nn.Linear(config.d_model, config.n_classes))

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b c"]:
        """Logits of the classes."""
        return self.classifier(self.dropout(self.bert.pooler(self.bert(ids, segments, mask))))


class BertForTokenClassification(_OnBert):
    """One of `n_classes` for each piece (section 5.3)."""

    def __init__(self, config: BertConfig):
        super().__init__(config, pooler=False, classifier=nn.Linear(config.d_model, config.n_classes))

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Logits of the classes of each piece."""
        return self.classifier(self.dropout(self.bert(ids, segments, mask)))


class BertForQuestionAnswering(_OnBert):
    """Where in the second segment the answer to the first begins and ends (section 4.2)."""

    def __init__(self, config: BertConfig):
        config = replace(config, n_classes=2)  # a span has two ends, which the file counts as classes
        super().__init__(config, pooler=False, span=nn.Linear(config.d_model, 2))

    def forward(
        self,
        ids: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"]]:
        """Logits of the first and of the last piece of the answer, over all pieces."""
        start, end = self.span(self.bert(ids, segments, mask)).unbind(-1)
        return start, end


_TRUNK = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.segments": "embeddings.token_type_embeddings",
    "embedding.positions.table": "embeddings.position_embeddings.weight",
    "embedding.norm": "embeddings.LayerNorm",
    "stack.blocks.*.attention.f.qkv": "encoder.layer.*.attention.self.{query,key,value}",
    "stack.blocks.*.attention.f.out": "encoder.layer.*.attention.output.dense",
    "stack.blocks.*.attention.norm": "encoder.layer.*.attention.output.LayerNorm",
    "stack.blocks.*.feed_forward.f.up": "encoder.layer.*.intermediate.dense",
    "stack.blocks.*.feed_forward.f.down": "encoder.layer.*.output.dense",
    "stack.blocks.*.feed_forward.norm": "encoder.layer.*.output.LayerNorm",
    "pooler.dense": "pooler.dense",
}
_MLM = {
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "mlm.bias": "cls.predictions.bias",
}
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def _layout(architecture: str, heads: dict[str, str] | None = None, tied: dict[str, str] | None = None) -> Layout:
    "One class of theirs: the trunk alone, or below heads."
    below = heads is not None
    trunk = {"bert." * below + ours: "bert." * below + theirs for ours, theirs in _TRUNK.items()}
    return Layout(
        architecture, "bert", BertConfig,
        settings={
            "vocab_size": "vocab_size",
            "max_len": "max_position_embeddings",
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "d_ff": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_segments": "type_vocab_size",
            "activation": "hidden_act",
            "dropout": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
            "eps": "layer_norm_eps",
        },
        values={"activation": {"gelu": ("gelu",), "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "relu": ("relu",)}},
        expects={
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
            "classifier_dropout": None,
        },
        names=trunk | (heads or {}), base="bert.", tied=tied or {},
        ignored=("embeddings.position_ids", "pooler.*", "cls.*", "classifier.*", "qa_outputs.*"),
    )


Bert.layouts = (_layout("BertModel"),)
BertForPreTraining.layouts = (_layout("BertForPreTraining", _MLM | {"nsp": "cls.seq_relationship"}, _TIED),)
BertForMaskedLM.layouts = (_layout("BertForMaskedLM", _MLM, _TIED),)
BertForSequenceClassification.layouts = (_layout("BertForSequenceClassification", {"classifier": "classifier"}),)
BertForTokenClassification.layouts = (_layout("BertForTokenClassification", {"classifier": "classifier"}),)
BertForQuestionAnswering.layouts = (_layout("BertForQuestionAnswering", {"span": "qa_outputs"}),)


class Masked(NamedTuple):
    """What the model reads, and where it is asked for the piece that stood there."""

    ids: Int[Tensor, "*b n"]
    chosen: Bool[Tensor, "*b n"]


def mask_pieces(
    ids: Int[Tensor, "*b n"],
    candidates: Bool[Tensor, "*b n"],
    *,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    masked: float = 0.8,
    random: float = 0.1,
    generator: torch.Generator | None = None,
) -> Masked:
    """Choose each candidate with probability `rate`, and hide some of what was chosen.

    Of the chosen pieces a share `masked` becomes `mask_id`, a share `random` any piece of the vocabulary, the
    rest stays. `candidates` is False at special tokens and padding. Devlin et al. 2019, section 3.1 and
    appendix A.1; drawn anew at each call as in Liu et al. 2019, section 4.1. Raises ValueError for shares
    outside [0, 1].
    """
    if not (0 <= rate <= 1 and masked >= 0 and random >= 0 and masked + random <= 1):
        raise ValueError(f"rate={rate}, masked={masked}, random={random} must be shares, the last two of one whole")

    def draw() -> Tensor:
        return torch.rand(ids.shape, generator=generator, device=ids.device)

    chosen, fate = candidates & (draw() < rate), draw()
    other = torch.randint(vocab_size, ids.shape, generator=generator, device=ids.device, dtype=ids.dtype)
    hidden = ids.masked_fill(chosen & (fate < masked), mask_id)
    return Masked(torch.where(chosen & (fate >= masked) & (fate < masked + random), other, hidden), chosen)


class Packed(NamedTuple):
    """One text or two as BERT reads them: pieces, and for each the text that it belongs to, 0 or 1."""

    ids: list[int]
    segments: list[int]


def pack(
    first: Sequence[int],
    second: Sequence[int] | None = None,
    *,
    cls_id: int,
    sep_id: int,
    max_len: int,
) -> Packed:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], at most `max_len` pieces.

    What is too long loses pieces at its end: of two texts always the longer one, at equal length the second.
    Devlin et al. 2019, figure 2. Raises ValueError where `max_len` has no room for the special tokens.
    """
    room = max_len - (2 if second is None else 3)
    if room < 0:
        raise ValueError(f"max_len={max_len} has no room for [CLS] and [SEP]: take at least {max_len - room}")
    after = 0 if second is None else len(second)
    kept = min(len(first), max(room - after, room - room // 2))
    ids = [cls_id, *first[:kept], sep_id]
    rest = [] if second is None else [*second[: room - kept], sep_id]
    return Packed(ids + rest, [0] * len(ids) + [1] * len(rest))


class NextSentence(NamedTuple):
    """Two sentences; `label` is 0 where the second follows the first, 1 where it is from another document."""

    first: Sequence[int]
    second: Sequence[int]
    label: int


def next_sentence_pairs(
    documents: Sequence[Sequence[Sequence[int]]], *, generator: torch.Generator | None = None
) -> list[NextSentence]:
    """A pair for each sentence that another follows: by even chance that one, or any of another document.

    A document is a list of sentences, a sentence a list of pieces. Nothing but `documents` is drawn from, so
    pairs of one split hold nothing of another. Devlin et al. 2019, section 3.1. Raises ValueError for fewer
    than two documents that hold a sentence.
    """
    documents = [document for document in documents if len(document)]
    if len(documents) < 2:
        raise ValueError(f"documents holds {len(documents)} with sentences: two are needed, to draw from another")

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    pairs = []
    for place, document in enumerate(documents):
        for first, after in pairwise(document):
            label = draw(2)
            if label:
                other = documents[(place + 1 + draw(len(documents) - 1)) % len(documents)]
                after = other[draw(len(other))]
            pairs.append(NextSentence(first, after, label))
    return pairs
