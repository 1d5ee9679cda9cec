"""Each model of the package beside its namesake in `transformers`: a row of TABLE says all that the tests must know of the two.

A model joins by one row; `test_parity.py` asks it everything, and the model's own tests take their twins from here.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from annotated_nlp import bert, bert_family, electra
from annotated_nlp.bert import BertConfig
from annotated_nlp.bert_family import AlbertConfig, RobertaConfig
from annotated_nlp.electra import ElectraConfig
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.llama import Llama, LlamaConfig
from annotated_nlp.hub import checkpoints
from annotated_nlp.t5 import T5, T5Config
from annotated_nlp.vit import DeiT, DeiTConfig, ViT, ViTConfig
from parity import lengths

THEIR_START, LARGE_WEIGHTS = "their start", "large weights"
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@dataclass(frozen=True)
class Batch:
    "What a model reads, by the names of our arguments; what it should say; and the masks of what counts in its outputs."

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor] = field(default_factory=dict)
    masks: tuple[Tensor, ...] = ()

    def to(self, *args) -> "Batch":
        "On a device; what is no integer in a type."
        move = lambda x: x.to(*args) if x.is_floating_point() else x.to(*(to for to in args if not isinstance(to, torch.dtype)))
        return Batch({name: move(x) for name, x in self.inputs.items()}, {name: move(x) for name, x in self.labels.items()}, self.masks)

    def real(self, x: Tensor) -> Tensor:
        "The entries that belong to real tokens."
        return next((x[mask.to(x.device)] for mask in self.masks if x.shape[:2] == mask.shape), x)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of our classes and one of theirs.

    `small` are settings of ours; `odd` configurations of theirs, each strange in its own way, the plain one first; `common` holds
    in all of them. `batches(config)` makes what the model is shown, from their configuration; `run` and `read` give the outputs of
    ours and of theirs in one order (with `labels=True` also their own loss, or None); `loss` is taken of either's outputs; `hidden` and
    `their_hidden` are the states of all layers.
    """

    name: str
    ours: type
    config: type
    theirs: type
    small: Mapping
    odd: Mapping[str, Mapping]
    common: Mapping
    rates: tuple[str, ...]  # their options of dropout, of which ours has one
    batches: Callable[..., list[Batch]]
    run: Callable[[nn.Module, Batch], tuple[Tensor, ...]]
    read: Callable[..., tuple[tuple[Tensor, ...], Tensor | None]]
    loss: Callable[[tuple[Tensor, ...], Batch], Tensor]
    hidden: Callable[[nn.Module, Batch], tuple[Tensor, ...]]
    their_hidden: Callable[[nn.Module, Batch], tuple[Tensor, ...]]
    kept: tuple[str, ...]  # options that come back as they went
    synonyms: Mapping = field(default_factory=dict)  # except for words that mean the same
    unsayable: tuple[Mapping, ...]  # settings of ours that their files have no word for; the last one is named
    undoable: tuple[tuple[str, object], ...]  # options of theirs that ours can't do
    never: Mapping  # a setting that is refused also when it is changed later
    sizes: Mapping[str, "Size"] = field(default_factory=dict)
    wide: Mapping = field(default_factory=dict)  # their options for the statistics of the start: most tensors have 20,000 numbers
    one_start: bool = True  # every matrix of ours begins with N(0, 0.02²)
    other_start: tuple[str, ...] = ()  # what theirs begins otherwise
    starts: Mapping[str, float | None] = field(default_factory=lambda: {THEIR_START: 0.02, LARGE_WEIGHTS: 0.3})
    made: Mapping[str, Mapping] = field(default_factory=lambda: {"": {}})  # ours that were never theirs: settings
    prepare: Callable[[nn.Module, float | None], None] = lambda theirs, std: None  # theirs, before its vectors are disturbed
    disturbed: Callable[[str, Tensor], bool] = lambda name, p: p.ndim == 1
    idle: Callable[[str, object], bool] = lambda part, config: False  # tensors of theirs that may have no part in the loss
    exact: float = 1e-13  # tolerance in float64
    floor: float = 1.0  # gradients (times 100) smaller than this are held to it
    own_loss: Callable[[tuple[Tensor, ...], Batch], Tensor] | None = None  # what theirs calls its loss, where `loss` has more in it
    loss_in_float32: bool = True  # theirs, whatever the model's precision
    bits: bool = False  # the same bits give the same outputs, or outputs within 1e-6
    precisely: Callable = lambda monkeypatch: None  # makes theirs compute in float64 what it is asked in float64

    def tolerance(self, dtype):
        return {torch.float32: 1e-5, torch.float64: self.exact}[dtype]

    def model_of_theirs(self, odd=None, std=0.3, **changes):
        "From its own initialiser, at evaluation; no bias stays at zero and no norm at one."
        options = {**self.common, **dict.fromkeys(self.rates, 0.0), **self.odd[odd or next(iter(self.odd))], **changes}
        theirs = self.theirs(self.theirs.config_class(**dict(initializer_range=std) if std is not None else {}, **options)).eval()
        with torch.no_grad():
            self.prepare(theirs, std)
            for name, p in theirs.named_parameters():
                if self.disturbed(name, p):
                    p.add_(0.1 * torch.randn_like(p))
        return theirs

    def twin(self, theirs, folder, **changes):
        "Ours with the same weights, by way of a folder."
        theirs.save_pretrained(folder)
        return self.ours.from_pretrained(folder, **changes)

    def both(self, folder, odd=None, std=0.3, **changes):
        theirs = self.model_of_theirs(odd, std, **changes)
        return self.twin(theirs, folder), theirs

    def alone(self, loud=0.3, **changes):
        "Ours without theirs."
        return made_loud(self.ours(self.config(**{**self.small, **changes})), loud)


def made_loud(model, loud=0.3):
    "At evaluation, with weights large enough that tokens differ from each other."
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(loud * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model.eval()


def parameters(build):
    "How many a model has, which is never made."
    with torch.device("meta"):
        model = build()
    assert all(p.is_meta for p in model.parameters()), "built in memory"
    return sum(p.numel() for p in model.parameters())


def as_saved(model, tensors, folder):
    "Tensors of their parameters' shapes under the names of their files, which need not be those of their modules."
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, tensor in zip(twin.parameters(), tensors, strict=True):
            p.copy_(torch.full_like(p, torch.nan) if tensor is None else tensor)
    twin.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same_gradients(ours, theirs, losses, tolerance, folder, floor=1.0, idle=lambda part, config: False):
    "Of every parameter, by the layout's table; none of theirs is left over. Gives the largest difference."
    found, wanted = (torch.autograd.grad(100 * loss, list(model.parameters()), allow_unused=True) for model, loss in zip((ours, theirs), losses))
    layout, wanted, left, worst = checkpoints._writable(ours)[0], as_saved(theirs, wanted, folder), set(), 0.0
    for (name, _), gradient in zip(ours.named_parameters(), found, strict=True):
        place = layout.place(name)
        left |= set(place.names)
        parts = [wanted[part].T if place.turned and wanted[part].ndim > 1 else wanted[part] for part in place.names]
        if gradient is None:
            assert all(part.isnan().all() for part in parts), f"{name} has a part in their loss"
            continue
        for part, value in zip(place.names, parts):
            assert value.abs().max() > 0 or idle(part, theirs.config), f"{part} has no part in the loss"
        both = torch.cat(parts)
        scale = max(floor, both.abs().max().item())
        worst = max(worst, (gradient - both).abs().max().item() / scale)
        assert_close(gradient, both, atol=tolerance * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert left == wanted.keys(), f"left over: {left ^ wanted.keys()}"
    return worst


# Sizes: settings of ours, options of theirs; how many parameters exactly, how many as printed, and how far that may be off


@dataclass(frozen=True)
class Size:
    config: object
    options: Mapping
    exact: int | None = None
    printed: float | None = None
    slack: float = 0.01


# GPT


def read_text(theirs, batch, labels=False):
    answer = theirs(batch.inputs["ids"], **batch.labels if labels else {})
    return (answer.logits,), answer.loss


def next_token(outputs, batch):
    return F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), batch.labels["labels"][:, 1:].flatten())


def text(c):
    "At every place that the model has."
    ids = torch.randint(c.vocab_size, (4, c.n_positions))
    return [Batch(dict(ids=ids), dict(labels=ids))]


def spread_places(by):
    def prepare(theirs, std):
        for name, p in theirs.named_parameters():
            if name.split(".")[-2] in ("wpe", "positions_embed"):
                p.mul_(by)  # or a token repeats itself for ever

    return prepare


gpt = partial(
    Row, ours=GPT, config=GPTConfig, common=dict(vocab_size=29, n_positions=24, pad_token_id=0, bos_token_id=None, eos_token_id=None),
    rates=("resid_pdrop", "embd_pdrop", "attn_pdrop"), batches=text, run=lambda model, batch: (model(**batch.inputs),), read=read_text, loss=next_token,
    hidden=lambda model, batch: model.states(**batch.inputs, all_layers=True),
    their_hidden=lambda theirs, batch: theirs(batch.inputs["ids"], output_hidden_states=True).hidden_states,
    kept=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop", "model_type", "architectures", "tie_word_embeddings"),
    never=dict(max_len=0), one_start=False, floor=0.0)
GPT_SMALL = dict(vocab_size=29, max_len=24, d_model=32, n_heads=4, n_layers=2, dropout=0.0)
GPT_UNSAYABLE = (dict(d_head=16), dict(norm="rms"), dict(gated=True), dict(bias=False), dict(scale=1.0), dict(prefix_lm=True))
GPTS = [
    gpt(name="gpt2", theirs=transformers.GPT2LMHeadModel, small=GPT_SMALL, prepare=spread_places(3), odd={
        "gpt2": dict(n_embd=32, n_head=4, n_layer=2),
        "gpt2 of one wide layer": dict(n_embd=35, n_head=5, n_layer=1, n_inner=50, activation_function="relu", layer_norm_epsilon=1e-3),
        "gpt2 of narrow layers": dict(n_embd=24, n_head=3, n_layer=5, n_inner=7, activation_function="gelu", layer_norm_epsilon=1e-6, n_positions=13),
        "gpt2 with one head": dict(n_embd=18, n_head=1, n_layer=2, activation_function="gelu_pytorch_tanh", vocab_size=3),
        "gpt2 with heads of one": dict(n_embd=6, n_head=6, n_layer=2, n_positions=2),
    }, unsayable=GPT_UNSAYABLE, wide=dict(n_embd=96, n_head=4, n_layer=6, vocab_size=2000, n_positions=1024), sizes={
        "gpt2": Size(GPTConfig.gpt2(), {}, 124_439_808, 124e6),
        "medium": Size(GPTConfig.gpt2("medium"), dict(n_embd=1024, n_layer=24, n_head=16), 354_823_168, 355e6),
        "large": Size(GPTConfig.gpt2("large"), dict(n_embd=1280, n_layer=36, n_head=20), 774_030_080, 774e6),
        "xl": Size(GPTConfig.gpt2("xl"), dict(n_embd=1600, n_layer=48, n_head=25), 1_557_611_200, 1558e6),
    }, undoable=(("activation_function", "mish"), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("tie_word_embeddings", False), ("add_cross_attention", True))),
    gpt(name="gpt1", theirs=transformers.OpenAIGPTLMHeadModel, small=GPT_SMALL | dict(norm_first=False), prepare=spread_places(2), odd={
        "gpt1": dict(n_embd=32, n_head=4, n_layer=2),
        "gpt1 with relu": dict(n_embd=30, n_head=5, n_layer=1, afn="relu", layer_norm_epsilon=1e-3),
        "gpt1 of many layers": dict(n_embd=21, n_head=3, n_layer=5, n_positions=13, vocab_size=101),
    }, unsayable=(*GPT_UNSAYABLE, dict(d_ff=50), dict(activation="gelu")), wide=dict(n_embd=96, n_head=4, n_layer=6, vocab_size=2000, n_positions=1024),
        undoable=(("afn", "silu"), ("tie_word_embeddings", False)), sizes={"gpt1": Size(GPTConfig.gpt1(), {}, 116_534_784, 117e6)}),
]


# Llama


def exact_norm(monkeypatch):
    "Their norm takes its mean square in float32, whatever it is given."
    for norm in (T5LayerNorm, LlamaRMSNorm):
        monkeypatch.setattr(norm, "forward", lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


def long_text(c):
    "Half as long as the model can read: positions cost it nothing."
    ids = torch.randint(c.vocab_size, (4, c.max_position_embeddings // 2))
    return [Batch(dict(ids=ids), dict(labels=ids))]


def rope(base):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=float(base)))


def llama_size(config):
    c = config
    return dict(vocab_size=c.vocab_size, hidden_size=c.d_model, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
                num_key_value_heads=c.n_kv_heads, intermediate_size=c.d_ff, tie_word_embeddings=c.tied)


llama = partial(
    Row, ours=Llama, config=LlamaConfig, theirs=transformers.LlamaForCausalLM, rates=("attention_dropout",), batches=long_text,
    run=lambda model, batch: (model(**batch.inputs),), read=read_text, loss=next_token,
    hidden=lambda model, batch: model.states(**batch.inputs, all_layers=True),
    their_hidden=lambda theirs, batch: theirs(batch.inputs["ids"], output_hidden_states=True).hidden_states,
    kept=("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_act",
          "rms_norm_eps", "attention_dropout", "attention_bias", "mlp_bias", "rope_parameters", "model_type", "architectures", "tie_word_embeddings"),
    small=dict(vocab_size=29, max_len=24, d_model=32, n_heads=4, n_kv_heads=2, d_ff=40, n_layers=2, dropout=0.0), never=dict(max_len=0),
    unsayable=(dict(norm="layer"), dict(gated=False), dict(scale=1.0), dict(norm_first=False)),
    wide=dict(hidden_size=96, num_attention_heads=4, num_hidden_layers=3, intermediate_size=256, vocab_size=2000, max_position_embeddings=1024), floor=0.0, precisely=exact_norm,
    undoable=(("hidden_act", "mish"), ("rope_scaling", dict(factor=2.0, rope_type="linear"))), synonyms=dict(gelu_pytorch_tanh="gelu_new"))
LLAMA = dict(vocab_size=29, max_position_embeddings=24, pad_token_id=None, bos_token_id=None, eos_token_id=None)
LLAMA_ODD = {
    "llama": dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=44),
    "llama of one wide layer": dict(hidden_size=36, num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=1, intermediate_size=7, hidden_act="gelu", rms_norm_eps=1e-2, **rope(100)),
    "llama with one head of keys": dict(hidden_size=30, num_attention_heads=5, num_key_value_heads=1, head_dim=14, num_hidden_layers=3, intermediate_size=50, attention_bias=True, mlp_bias=True, **rope(5e5)),
    "llama with heads of two": dict(hidden_size=6, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=4, intermediate_size=6, vocab_size=101, max_position_embeddings=300, hidden_act="gelu_pytorch_tanh"),
}
LLAMAS = [
    llama(name="llama", common=LLAMA | dict(tie_word_embeddings=False), odd=LLAMA_ODD, sizes={
        "7B": Size(LlamaConfig.llama2(), llama_size(LlamaConfig.llama2()), 6_738_415_616, 6.74e9),
        "13B": Size(LlamaConfig.llama2("13B"), llama_size(LlamaConfig.llama2("13B")), 13_015_864_320, 13.02e9),
        "70B": Size(LlamaConfig.llama2("70B"), llama_size(LlamaConfig.llama2("70B")), 68_976_648_192, 68.98e9),
        "llama 3, 8B": Size(LlamaConfig.llama3(), llama_size(LlamaConfig.llama3()), 8_030_261_248, 8.03e9),
        "tinyllama": Size(LlamaConfig.tinyllama(), llama_size(LlamaConfig.tinyllama()), 1_100_048_384, 1.1e9),
    }),
    llama(name="llama with one matrix for both", common=LLAMA | dict(tie_word_embeddings=True), odd=LLAMA_ODD, made={"": dict(tied=True)}, sizes={
        size: Size(LlamaConfig.smollm2(size), llama_size(LlamaConfig.smollm2(size)), exact, printed)
        for size, exact, printed in (("135M", 134_515_008, 134.5e6), ("360M", 361_821_120, 362e6), ("1.7B", 1_711_376_384, 1.71e9))}),
]


# BERT and ELECTRA: encoders with a head


def pieces(c):
    "Ids of every place, segments of every kind, and a mask. No 0, whose vector theirs never learns where it is read."
    n = c.max_position_embeddings
    mask = lengths(n, n // 2, 1, n - 2)
    return dict(ids=torch.randint(1, c.vocab_size, mask.shape), segments=torch.randint(c.type_vocab_size, mask.shape), mask=mask)


def asked(c, mask):
    "Their labels: -100 is not asked for."
    labels = torch.where(torch.rand(mask.shape) < 0.4, torch.randint(c.vocab_size, mask.shape), -100)
    labels[0, 0] = 1
    return labels


def encoded(labels):
    "Batches with the head's labels, `labels(config, mask)`."

    def batches(c):
        inputs = pieces(c)
        return [Batch(inputs, labels(c, inputs["mask"]), (inputs["mask"],))]

    return batches


def read_pieces(theirs, batch, labels=False):
    x = batch.inputs
    answer = theirs(x["ids"], token_type_ids=x["segments"], attention_mask=x["mask"].long(), **batch.labels if labels else {})
    return answer.to_tuple()[1 if answer.get("loss") is not None else 0 :], answer.get("loss")


def run_pieces(model, batch):
    found = model(**batch.inputs)
    if getattr(model, "pooler", None) is not None:
        return found, model.pooler(found)
    return found if isinstance(found, tuple) else (found,)


def upstream(x):
    "The same for both models."
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)


def of_states(outputs, batch):
    "A trunk's: of its states and, where it has one, of its pooler."
    states = outputs[0]
    return (states.square() + states * upstream(states))[batch.inputs["mask"]].mean() + sum((x * upstream(x)).mean() for x in outputs[1:])


def of_pieces(outputs, batch):
    return F.cross_entropy(outputs[0].flatten(0, 1), batch.labels["labels"].flatten(), ignore_index=-100)


def of_pieces_and_order(outputs, batch):
    return of_pieces(outputs, batch) + F.cross_entropy(outputs[1], batch.labels["next_sentence_label"])


def of_texts(outputs, batch):
    labels = batch.labels["labels"]
    return F.mse_loss(outputs[0][:, 0], labels) if labels.is_floating_point() else F.cross_entropy(outputs[0], labels)


def of_spans(outputs, batch):
    n = outputs[0].shape[1]
    return sum(F.cross_entropy(logits, side.clamp(max=n), ignore_index=n) for logits, side in zip(outputs, batch.labels.values())) / 2


def of_replaced(outputs, batch):
    mask = batch.inputs["mask"]
    return F.binary_cross_entropy_with_logits(outputs[0][mask], batch.labels["labels"][mask].to(outputs[0]))


def spans(c, mask):
    "An answer that was cut off points behind the text."
    first, last = torch.randint(mask.shape[1], (2, len(mask)))
    last[-1] = mask.shape[1] + 3
    return dict(start_positions=first, end_positions=last)


def classes(c, mask):
    return dict(labels=torch.randint(c.num_labels, (len(mask),)) if c.num_labels > 1 else torch.randn(len(mask)))


def tags(c, mask):
    return dict(labels=torch.randint(c.num_labels, mask.shape).where(mask, -100))


NOTHING, PIECES = (lambda c, mask: {}, of_states), (lambda c, mask: dict(labels=asked(c, mask)), of_pieces)
ORDER = (lambda c, mask: dict(labels=asked(c, mask), next_sentence_label=torch.randint(2, (len(mask),))), of_pieces_and_order)
REPLACED = (lambda c, mask: dict(labels=torch.randint(2, mask.shape)), of_replaced)
TEXTS, TAGS, SPANS = (classes, of_texts), (tags, of_pieces), (spans, of_spans)
ENCODER_KEPT = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size", "layer_norm_eps",
                "hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "model_type", "hidden_act", "tie_word_embeddings")
ENCODER_UNSAYABLE = (dict(d_head=16), dict(norm="rms"), dict(gated=True), dict(bias=False), dict(scale=1.0), dict(norm_first=True))
ENCODER_UNDOABLE = (("hidden_act", "mish"), ("position_embedding_type", "relative_key"), ("is_decoder", True), ("add_cross_attention", True), ("tie_word_embeddings", False))


def their_encoder_states(theirs, batch):
    x = batch.inputs
    return theirs.base_model(x["ids"], token_type_ids=x["segments"], attention_mask=x["mask"].long(), output_hidden_states=True).hidden_states


def encoder(module, config, name, head, **row):
    labels, loss = head
    return Row(**dict(
        name=name, ours=getattr(module, name.replace("Model", ""), None), config=config, theirs=getattr(transformers, name),
        common=dict(vocab_size=29, max_position_embeddings=24), rates=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        batches=encoded(labels), run=run_pieces, read=read_pieces, loss=loss,
        hidden=lambda model, batch: getattr(model, "trunk", model).states(**batch.inputs, all_layers=True), their_hidden=their_encoder_states,
        unsayable=ENCODER_UNSAYABLE, undoable=ENCODER_UNDOABLE, never=dict(n_segments=0),
        # a key's bias and what shifts all scores alike are lost in the softmax
        idle=lambda part, c: part.endswith(("query.bias", "key.bias", "token_type_embeddings.weight"))) | row)


ENCODER_SMALL = dict(vocab_size=29, max_len=24, d_model=32, n_heads=4, d_ff=48, n_layers=2, dropout=0.0)
BERT_ODD = {
    "plain": dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48),
    "one wide layer": dict(hidden_size=35, num_attention_heads=5, num_hidden_layers=1, intermediate_size=90, hidden_act="relu", layer_norm_eps=1e-3, num_labels=7),
    "many narrow layers": dict(hidden_size=18, num_attention_heads=1, num_hidden_layers=6, intermediate_size=5, hidden_act="gelu_new", type_vocab_size=3, max_position_embeddings=11, num_labels=1),
    "heads of one": dict(hidden_size=6, num_attention_heads=6, num_hidden_layers=2, intermediate_size=24, type_vocab_size=1, layer_norm_eps=1e-5, vocab_size=101, num_labels=3),
}
BERT_LARGE = dict(hidden_size=1024, num_attention_heads=16, num_hidden_layers=24, intermediate_size=4096)
BERT_WIDE = dict(vocab_size=3000, max_position_embeddings=400, type_vocab_size=320, hidden_size=128, num_attention_heads=4, intermediate_size=512, num_hidden_layers=2, num_labels=160)


def bert_(name, head, **row):
    base, large = (109_482_240, 335_141_888) if name == "BertModel" else (None, None)
    printed = (110e6, 340e6) if name == "BertModel" else (None, None)
    return encoder(bert, BertConfig, name, head, **dict(
        small=ENCODER_SMALL, odd=BERT_ODD, kept=ENCODER_KEPT, wide=BERT_WIDE,
        sizes={"base": Size(BertConfig.base(), {}, base, printed[0], 0.015), "large": Size(BertConfig.large(), BERT_LARGE, large, printed[1], 0.015)}) | row)


def labelled(odd, least, most):
    "A span has two ends; of one class alone, tokens have nothing to learn."
    return {name: options | dict(num_labels=min(most, max(least, options.get("num_labels", 2)))) for name, options in odd.items()}


BERTS = [
    bert_("BertModel", NOTHING), bert_("BertForPreTraining", ORDER), bert_("BertForMaskedLM", PIECES),
    bert_("BertForSequenceClassification", TEXTS, made={"": dict(n_classes=5)}),
    bert_("BertForTokenClassification", TAGS, made={"": dict(n_classes=5)}, odd=labelled(BERT_ODD, 2, 99)),
    bert_("BertForQuestionAnswering", SPANS, made={"": dict(n_classes=2)}, odd=labelled(BERT_ODD, 2, 2), wide=BERT_WIDE | dict(num_labels=2)),
]

ELECTRA_ODD = {
    "narrow embedding": dict(embedding_size=12, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48),
    "no projection": dict(embedding_size=35, hidden_size=35, num_attention_heads=5, num_hidden_layers=1, intermediate_size=90, hidden_act="relu", layer_norm_eps=1e-3, num_labels=7),
    "a wide embedding, as a generator's": dict(embedding_size=64, hidden_size=16, num_attention_heads=1, num_hidden_layers=3, intermediate_size=5, hidden_act="gelu_new", type_vocab_size=3, max_position_embeddings=11),
    "heads of one": dict(embedding_size=3, hidden_size=6, num_attention_heads=6, num_hidden_layers=2, intermediate_size=24, type_vocab_size=1, layer_norm_eps=1e-5, vocab_size=101, num_labels=3),
}
ELECTRA_SIZES = {
    "small": ({}, 14e6, 13_549_057), "base": (dict(embedding_size=768, hidden_size=768, num_attention_heads=12, intermediate_size=3072), 110e6, 109_483_009),
    "large": (dict(embedding_size=1024, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=24), 335e6, 335_142_913)}


def electra_(name, head, **row):
    own = name == "ElectraForPreTraining"
    sizes = {size: Size(getattr(ElectraConfig, size)(), options, exact if own else None, printed if own else None, 0.04) for size, (options, printed, exact) in ELECTRA_SIZES.items()}
    return encoder(electra, ElectraConfig, name, head, small=ENCODER_SMALL | dict(d_embedding=20), odd=ELECTRA_ODD, sizes=sizes,
                   kept=(*ENCODER_KEPT, "embedding_size"), wide=BERT_WIDE | dict(embedding_size=64), exact=1e-12, **row)


ELECTRAS = [
    electra_("ElectraModel", NOTHING), electra_("ElectraForMaskedLM", PIECES), electra_("ElectraForPreTraining", REPLACED),
    electra_("ElectraForSequenceClassification", TEXTS, made={"": dict(n_classes=5)}), electra_("ElectraForTokenClassification", TAGS, made={"": dict(n_classes=5)}),
]

# The family after BERT


def counted_pieces(c):
    "Rows with RoBERTa's padding, which has no position of its own, as long as a text can be."
    n = c.max_position_embeddings - c.pad_token_id - 1
    mask = lengths(n, n // 2, 1, n - 2)
    ids = torch.randint(c.vocab_size - 1, mask.shape)
    ids = (ids + (ids >= c.pad_token_id)).where(mask, c.pad_token_id)
    return dict(ids=ids, segments=torch.randint(c.type_vocab_size, mask.shape), mask=mask)


def counted(labels):
    "What stands at padding is not asked for: theirs never learns a vector there."

    def batches(c):
        inputs = counted_pieces(c)
        asked = {name: x.where(inputs["mask"], -100) for name, x in labels(c, inputs["mask"]).items()}
        return [Batch(inputs, asked, (inputs["mask"],))]

    return batches


ROBERTA_ODD = {name: dict(pad_token_id=1) | options for name, options in BERT_ODD.items()} | {
    "many narrow layers": BERT_ODD["many narrow layers"] | dict(pad_token_id=5),
    "heads of one": BERT_ODD["heads of one"] | dict(pad_token_id=0),
}
ROBERTA_LARGE = BERT_LARGE | dict(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1)


def roberta_(name, head, config=RobertaConfig, **row):
    base, large = (124_645_632, 355_359_744) if name == "RobertaModel" else (None, None)
    printed = (125e6, 355e6) if name == "RobertaModel" else (None, None)
    common = dict(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1)
    return encoder(bert_family, config, name, head, **dict(
        small=ENCODER_SMALL | dict(max_len=26, n_segments=2), odd=ROBERTA_ODD, kept=(*ENCODER_KEPT, "pad_token_id"), wide=BERT_WIDE, batches=counted(head[0]),
        sizes={"base": Size(RobertaConfig.base(), common, base, printed[0]), "large": Size(RobertaConfig.large(), ROBERTA_LARGE, large, printed[1])}) | row)


ROBERTAS = [roberta_("RobertaModel", NOTHING), roberta_("RobertaForMaskedLM", PIECES)]

ALBERT_ODD = {
    "narrow embedding": dict(embedding_size=12, hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48),
    "equal widths": dict(embedding_size=35, hidden_size=35, num_attention_heads=5, num_hidden_layers=1, intermediate_size=90, hidden_act="relu", layer_norm_eps=1e-3),
    "a wide embedding": dict(embedding_size=64, hidden_size=16, num_attention_heads=1, num_hidden_layers=6, intermediate_size=5, hidden_act="gelu", type_vocab_size=3, max_position_embeddings=11),
    "heads of one": dict(embedding_size=3, hidden_size=6, num_attention_heads=6, num_hidden_layers=2, intermediate_size=24, type_vocab_size=1, layer_norm_eps=1e-5, vocab_size=101),
}
SWAPPED = (lambda c, mask: dict(labels=asked(c, mask), sentence_order_label=torch.randint(2, (len(mask),))),
           lambda outputs, batch: of_pieces(outputs, batch) + F.cross_entropy(outputs[1], batch.labels["sentence_order_label"]))
ALBERT_SIZES = {  # the paper's 235M for xxlarge is 5 % more than its own settings give
    "base": (768, 12, 12, 11_683_584, 12e6), "large": (1024, 24, 16, 17_683_968, 18e6),
    "xlarge": (2048, 24, 32, 58_724_864, 60e6), "xxlarge": (4096, 12, 64, 222_595_584, 235e6)}


def albert_(name, head, **row):
    own, sizes = name == "AlbertModel", {}
    for size, (d, n_layers, n_heads, exact, printed) in ALBERT_SIZES.items():
        options = dict(hidden_size=d, num_hidden_layers=n_layers, num_attention_heads=n_heads, intermediate_size=4 * d)
        sizes[size] = Size(getattr(AlbertConfig, size)(), options, exact if own else None, printed if own else None, 0.055)
    return encoder(bert_family, AlbertConfig, name, head, **dict(
        small=ENCODER_SMALL | dict(d_embedding=20), odd=ALBERT_ODD, sizes=sizes, kept=(*ENCODER_KEPT, "embedding_size"), wide=BERT_WIDE | dict(embedding_size=64),
        unsayable=(*ENCODER_UNSAYABLE, dict(shared=False)),
        undoable=(("hidden_act", "mish"), ("position_embedding_type", "relative_key"), ("num_hidden_groups", 2), ("inner_group_num", 2), ("tie_word_embeddings", False))) | row)


ALBERTS = [
    albert_("AlbertModel", NOTHING), albert_("AlbertForMaskedLM", PIECES),
    albert_("AlbertForPreTraining", SWAPPED, ours=bert_family.AlbertForSentenceOrder, wide=BERT_WIDE | dict(embedding_size=64, num_labels=2)),
]


# T5


def translation(c, m=37, n=23):
    "A source with its mask, labels with -100 behind the text, what the decoder reads for them, and which of it is real."
    mask, tokens = lengths(m, m // 2, 1, m - 2), lengths(n, 4, n - 1, 9)
    labels = torch.randint(c.vocab_size, tokens.shape).masked_fill(~tokens, -100)
    start = c.decoder_start_token_id if hasattr(c, "decoder_start_token_id") else c.pad_id
    tgt = F.pad(labels, (1, -1), value=start)
    return torch.randint(c.vocab_size, mask.shape), mask, tgt.masked_fill(tgt == -100, start), labels, tokens


def translations(c):
    "Texts longer than the last bucket's beginning, and a row of one token."
    src, mask, tgt, labels, tokens = translation(c)
    return [Batch(dict(src=src, tgt=tgt, src_mask=mask), dict(labels=labels), (mask, tokens))]


def read_translation(theirs, batch, labels=False, **options):
    x = batch.inputs
    said = batch.labels if labels else dict(decoder_input_ids=x["tgt"])  # of labels theirs makes that itself
    answer = theirs(x["src"], attention_mask=x["src_mask"].long(), **said, **options)
    return (answer.logits,), answer.loss


def their_t5_states(theirs, batch):
    x = batch.inputs
    answer = theirs(x["src"], attention_mask=x["src_mask"].long(), decoder_input_ids=x["tgt"], output_hidden_states=True)
    return answer.encoder_hidden_states + answer.decoder_hidden_states


def their_t5(own_head):
    "No norm stays at one; and theirs starts with a head that is the embedding: a head of its own is one."

    def prepare(theirs, std):
        if own_head:
            theirs.lm_head.weight = nn.Parameter(torch.randn_like(theirs.lm_head.weight))
        for p in theirs.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
            elif std is not None:
                p.copy_(std * torch.randn_like(p))

    return prepare


T5_SMALL = dict(vocab_size=29, d_model=32, n_heads=4, d_head=8, d_ff=48, n_layers=2, dropout=0.0)
NEW_OURS, NEW_THEIRS = dict(activation="gelu_tanh", gated=True, tied=False), dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
T5_ODD = {
    "plain": dict(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48),
    "wide heads, one layer": dict(d_model=20, d_kv=9, num_heads=3, num_layers=1, d_ff=90, layer_norm_epsilon=1e-3, relative_attention_num_buckets=7, relative_attention_max_distance=9),
    "narrow heads, a short decoder": dict(d_model=18, d_kv=2, num_heads=5, num_layers=4, num_decoder_layers=1, d_ff=7, relative_attention_num_buckets=4, relative_attention_max_distance=50, pad_token_id=3, eos_token_id=5, decoder_start_token_id=3),
    "heads of one, a long decoder": dict(d_model=6, d_kv=1, num_heads=6, num_layers=1, num_decoder_layers=3, d_ff=24, vocab_size=101, relative_attention_num_buckets=64, relative_attention_max_distance=40),
}
T5_SIZES = {"small": (60, 77, 60_506_624), "base": (220, 250, 222_903_552), "large": (770, 780, 737_668_096), "xl": (3000, 3000, 2_851_598_336), "xxl": (11_000, 11_000, 11_307_321_344)}


def t5_(version, ours, theirs, made):
    "As the papers have the sizes, in millions; 1.1's are of its release."
    sizes = {}
    for size, (old, new, exact) in T5_SIZES.items():
        config = getattr(T5Config, size)(version)
        options = {option: getattr(config, setting) for option, setting in dict(
            d_model="d_model", d_kv="d_head", num_heads="n_heads", num_layers="n_layers", d_ff="d_ff", vocab_size="vocab_size").items()}
        sizes[size] = Size(config, options | theirs, exact if version == "1.0" else None, 1e6 * (old if version == "1.0" else new), 0.06)
    return Row(
        name=f"t5-{version}", ours=T5, config=T5Config, theirs=transformers.T5ForConditionalGeneration, small=T5_SMALL | ours,
        odd={name: options | theirs for name, options in T5_ODD.items()}, common=dict(vocab_size=29, decoder_start_token_id=0), rates=("dropout_rate",),
        batches=translations, run=lambda model, batch: (model(**batch.inputs),), read=read_translation, loss=of_pieces,
        hidden=lambda model, batch: sum(model.states(**batch.inputs, all_layers=True), ()), their_hidden=their_t5_states,
        kept=("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate",
              "layer_norm_epsilon", "feed_forward_proj", "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "pad_token_id", "eos_token_id", "decoder_start_token_id", "is_encoder_decoder", "model_type"),
        unsayable=(dict(norm="layer"), dict(norm="layer", bias=True), dict(scale=0.5), dict(norm_first=False), dict(activation="gelu"),
                   *([dict(activation="gelu_tanh"), dict(gated=True)] if version == "1.0" else [dict(activation="relu")])),
        undoable=(("feed_forward_proj", "gated-silu"), ("feed_forward_proj", "gelu"), ("is_encoder_decoder", False), ("decoder_start_token_id", 7), ("num_layers", "two")),
        never=dict(n_buckets=3), one_start=False, sizes=sizes, starts={THEIR_START: None, LARGE_WEIGHTS: 0.3}, made=made, prepare=their_t5(version == "1.1"), disturbed=lambda name, p: False,
        wide=dict(d_model=96, d_ff=200, vocab_size=2000, num_heads=5, d_kv=24, num_layers=3, relative_attention_num_buckets=4096, relative_attention_max_distance=9000) | theirs,
        exact=1e-12, loss_in_float32=False, bits=True, precisely=exact_norm)


T5S = [t5_("1.0", {}, {}, {"tied": {}, "tied, gated": dict(gated=True, activation="gelu_tanh")}),
       t5_("1.1", NEW_OURS, NEW_THEIRS, {"untied, gated": {}, "untied": dict(gated=False, activation="relu")})]


# ViT and DeiT


def images_(config, height=None, width=None, b=4):
    c = getattr(config, "num_channels", None) or config.n_channels
    return torch.randn(b, c, height or config.image_size, width or height or config.image_size)


def pictures(c):
    "At the size that the model is made for, and at two to which its places are interpolated."
    wide = c.image_size + 2 * c.patch_size
    sizes = [(c.image_size, c.image_size), (2 * c.patch_size, 3 * c.patch_size), (wide, wide)]
    return [Batch(dict(images=images_(c, *sides)), dict(labels=torch.randint(c.num_labels, (4,)))) for sides in sizes]


def see(model, batch):
    "All logits, of a DeiT its two heads' and their mean, and the last states."
    images = batch.inputs["images"]
    return (model(images), *(model.heads(images) if isinstance(model, DeiT) else ()), model.states(images))


def their_sight(theirs, batch, labels=False):
    images = batch.inputs["images"]
    ask = labels and theirs.config.model_type == "vit" and theirs.config.num_labels > 1  # a DeiT with its teacher has no loss of its own
    answer = theirs(images, interpolate_pos_encoding=True, **batch.labels if ask else {})
    states = theirs.base_model(images, interpolate_pos_encoding=True).last_hidden_state
    heads = (answer.cls_logits, answer.distillation_logits) if "cls_logits" in answer else ()
    return (answer.logits, *heads, states), answer.get("loss")


def of_sight(outputs, batch):
    *logits, states = outputs
    return sum(F.cross_entropy(z, batch.labels["labels"]) for z in logits) + (states * states.detach().cos()).mean()


def their_vit_states(theirs, batch):
    "Their last one is that before the last norm."
    answer = theirs.base_model(batch.inputs["images"], interpolate_pos_encoding=True, output_hidden_states=True)
    return (*answer.hidden_states[:-1], answer.last_hidden_state)


VIT_ODD = {
    "plain": dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, image_size=12, patch_size=4),
    "one wide layer": dict(hidden_size=35, num_attention_heads=5, num_hidden_layers=1, intermediate_size=90, hidden_act="relu", layer_norm_eps=1e-3, num_labels=7, image_size=15, patch_size=3, num_channels=1),
    "many narrow layers": dict(hidden_size=18, num_attention_heads=1, num_hidden_layers=6, intermediate_size=5, hidden_act="gelu_new", image_size=10, patch_size=5, num_channels=4, num_labels=1),
    "heads of one, one patch": dict(hidden_size=6, num_attention_heads=6, num_hidden_layers=2, intermediate_size=24, image_size=7, patch_size=7, layer_norm_eps=1e-5, num_labels=3),
    "patches of one pixel": dict(hidden_size=24, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, image_size=4, patch_size=1, num_channels=2, num_labels=11),
}
VIT_WIDE = dict(hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512, image_size=36, patch_size=4, num_channels=5, num_labels=80)
VIT_SIZES = {ViT: (ViTConfig, ("b16", "l16", "h14")), DeiT: (DeiTConfig, ("tiny", "small", "base"))}


def vit_(ours, theirs):
    config, names = VIT_SIZES[ours]
    made = {name: getattr(config, name)() for name in names}
    return Row(
        name=ours.__name__, ours=ours, config=config, theirs=theirs, small=dict(image_size=12, patch_size=4, n_channels=3, n_classes=5, d_model=32, n_heads=4, d_ff=48, n_layers=2),
        odd=VIT_ODD, common={}, rates=("hidden_dropout_prob", "attention_probs_dropout_prob"), batches=pictures, run=see, read=their_sight, loss=of_sight, own_loss=lambda outputs, batch: F.cross_entropy(outputs[0], batch.labels["labels"]),
        hidden=lambda model, batch: model.states(batch.inputs["images"], all_layers=True), their_hidden=their_vit_states,
        kept=("image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps",
              "hidden_dropout_prob", "attention_probs_dropout_prob", "num_labels", "model_type", "hidden_act", "qkv_bias"), synonyms={"gelu_new": "gelu_pytorch_tanh"},
        unsayable=(*ENCODER_UNSAYABLE[:-1], dict(norm_first=False)), undoable=(("hidden_act", "mish"), ("qkv_bias", False), ("image_size", [12, 24]), ("patch_size", [4, 2])),
        never=dict(image_size=13), disturbed=lambda name, p: p.ndim == 1 or "token" in name or "position" in name, wide=VIT_WIDE, other_start=("_token", "position_embeddings") if ours is DeiT else (),
        # a key's bias is lost in the softmax; a head over one class has one answer
        idle=lambda part, c: "key.bias" in part or c.num_labels == 1 and "classifier" in part,
        sizes={name: Size(c, dict(patch_size=c.patch_size, hidden_size=c.d_model, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, intermediate_size=c.d_ff, num_labels=1000)) for name, c in made.items()})


VITS = [vit_(ViT, transformers.ViTForImageClassification), vit_(DeiT, transformers.DeiTForImageClassificationWithTeacher)]

TABLE = [*GPTS, *LLAMAS, *BERTS, *ELECTRAS, *ROBERTAS, *ALBERTS, *T5S, *VITS]
ROWS = {row.name: row for row in TABLE}


def over(*names, condition=lambda row: True):
    "A test over the rows of these names, or all, for which the condition holds."
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if (row.name in names or not names) and condition(row)])


def each(values, *, name):
    "A test over the rows, and what each lists: `values(row)`, a mapping or a tuple."
    cases = [(row, value) for row in TABLE for value in values(row)]
    return pytest.mark.parametrize(f"row,{name}", [pytest.param(row, value, id=f"{row.name}-{value if isinstance(value, str) else spelt(value)}") for row, value in cases])


def spelt(value):
    return ",".join(f"{option}={x}" for option, x in (value.items() if isinstance(value, Mapping) else [value]))
