"""What every model must keep: no view of the future, no trace of padding, the same answer by every route.

A model joins by one line in MODELS. Each invariant is a function of a model, and `BROKEN` shows that it notices.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import TypeCheckError
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from annotated_nlp import attention
from annotated_nlp.attention import dot_product_attention
from annotated_nlp.bert import BertConfig, BertForMaskedLM
from annotated_nlp.bert_family import AlbertConfig, AlbertForMaskedLM, RobertaConfig
from annotated_nlp.bert_family import RobertaForMaskedLM
from annotated_nlp.captioning import Captioner, CaptionerConfig, FeatureMap, ShowAndTell
from annotated_nlp.contextual import LSTMConfig, LSTMLanguageModel
from annotated_nlp.electra import ElectraConfig, ElectraForMaskedLM
from annotated_nlp.electra import ElectraForPreTraining
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.parts import kernels
from annotated_nlp.parts.canine import Canine, CanineConfig
from annotated_nlp.parts.deberta import DebertaConfig, DebertaForMaskedLM
from annotated_nlp.parts.deberta import DebertaForPreTraining
from annotated_nlp.parts.embedding import Positions
from annotated_nlp.parts.kernels import KVCache
from annotated_nlp.parts.xlnet import XLNet, XLNetConfig
from annotated_nlp.seq2seq import Seq2Seq, Seq2SeqConfig
from annotated_nlp.t5 import T5, T5Config
from annotated_nlp.transformer import Block, FeedForward, Transformer, TransformerConfig
from annotated_nlp.vit import DeiT, ViT, ViTConfig

V, LENGTHS, TARGET = 20, [7, 4, 6, 2], 9  # vocabulary; real source tokens of each row; target tokens of every row
SIDE = 8  # of a square image

class BothHeads(DeiT):
    "A DeiT's two heads side by side, in training as at evaluation."

    def forward(self, images):
        return torch.cat(self.heads(images), -1)


class BothStreams(XLNet):
    "What XLNet gives with both sides in view, and its two streams read from left to right."

    def forward(self, ids, mask=None):
        both = super().forward(ids, mask=mask)
        order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return torch.cat([both, *self.two_streams(ids, order, ids % 2, mask)], -1)


class FilledCanine(Canine):
    """CANINE on texts that are padded as it must be: one character, up to a whole group, and two groups more.

    Its convolutions read what follows a text, as in `transformers`. So padding of another kind leaves a trace, and so does
    more of it where there are no such groups (`test_canine_reads_what_follows_a_text`).
    """

    def forward(self, ids, mask=None):
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        if ids.shape != mask.shape or ids.ndim != 2 or ids.is_floating_point():
            return super().forward(ids, mask=mask)  # which refuses them
        n, rate = ids.shape[1], self.config.rate
        more = (0, -n % rate + 2 * rate)
        return super().forward(F.pad(ids.where(mask, 0), more), mask=F.pad(mask, more))[:, :n]


def vit_(model=ViT):
    sizes = dict(image_size=SIDE, patch_size=4, n_channels=1, n_classes=V, d_model=32, n_heads=4, d_ff=48, n_layers=2)
    return lambda **changes: loud(model(ViTConfig(**sizes | changes)))


def transformer_(model=Transformer, **settings):
    def build(**changes):
        sizes = dict(src_vocab_size=V, tgt_vocab_size=V, d_model=32, n_heads=4, d_ff=48, n_layers=2, max_len=24, dropout=0.0)
        return model(TransformerConfig(**sizes | settings | changes))

    return build


def loud(model):
    "Matrices ten times as large as GPT and BERT begin with, so that what happens shows."
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10 if p.ndim > 1 else 1)
    return model


def gpt_(kind):
    sizes = dict(vocab_size=V, d_model=32, n_heads=4, n_layers=2, max_len=24, dropout=0.0)
    return lambda **changes: loud(GPT(kind(**sizes | changes)))


def awd_lstm_(dropout=0.0, **changes):
    kinds = dict.fromkeys(("words", "input", "weights", "hidden", "output"), dropout)
    sizes = dict(vocab_size=V, d_model=16, d_hidden=24, n_layers=2) | {f"dropout_{kind}": p for kind, p in kinds.items()}
    return LSTMLanguageModel(LSTMConfig(**sizes | changes))


def reader_(model, config, **settings):
    def build(positions="learned", **changes):
        sizes = dict(vocab_size=V, d_model=32, n_heads=4, d_ff=48, n_layers=2, max_len=24, dropout=0.0)
        made = loud(model(config(**sizes | settings | changes)))
        if positions == "none":
            nn.init.zeros_(made.trunk.embedding.positions.table)
        return made

    return build


def canine_(model=FilledCanine):
    sizes = dict(d_model=32, n_heads=4, d_ff=48, n_layers=2, n_segments=1, n_hashes=4, n_buckets=40, window=16, max_len=40, dropout=0.0)
    return lambda **changes: loud(model(CanineConfig(**sizes | changes)))


def xlnet_():
    sizes = dict(vocab_size=V, d_model=32, n_heads=4, d_ff=48, n_layers=2, dropout=0.0)
    return lambda **changes: loud(BothStreams(XLNetConfig(**sizes | changes)))


def t5_(**version):
    def build(positions="relative", **changes):
        sizes = dict(vocab_size=V, d_model=32, n_heads=4, d_head=8, d_ff=48, n_layers=2, dropout=0.0)
        model = T5(T5Config(**sizes | version | changes))
        if positions == "none":
            nn.init.zeros_(model.encoder_bias.table.weight)
        return model

    return build


def seq2seq_(*attention, **settings):
    return lambda **changes: Seq2Seq(Seq2SeqConfig(V, V, **dict(d_model=16, n_layers=2) | settings | changes), *attention)


def captioner_(dropout=0.0, n_layers=2, max_len=24):
    sizes = dict(n_heads=4, d_ff=48, n_layers=n_layers, dropout=dropout)
    encoder = ViTConfig(image_size=SIDE, patch_size=4, n_channels=1, d_model=16, **sizes)  # heads of 4: in float32, fused kernels of CUDA want a multiple
    decoder = GPTConfig(vocab_size=V, max_len=max_len, d_model=32, **sizes)
    return loud(Captioner(CaptionerConfig(encoder=encoder, decoder=decoder, bos_id=2, eos_id=3, pad_id=0)))


def teller_(*attention):
    return lambda dropout=0.0, n_layers=1: ShowAndTell(FeatureMap(1, SIDE, 4, 16, width=8), V, 16, *attention, dropout=dropout)


MODERN = dict(norm="rms", norm_first=True, activation="gelu_tanh", gated=True, bias=False, positions="learned", shared_vocab=True)


class Case(NamedTuple):
    """A model of this suite.

    `build(**changes)` makes it small, in float32 on the CPU, for V tokens and at least 24 places, with two layers;
    `dropout` and `n_layers` may be changed, and `positions` for one that is `unordered`. `takes` names the arguments of its call:
    "pair": src, tgt, src_mask; "prefix": ids, each position seeing what came before; "text": ids, mask;
    "images": images; "caption": images, ids. `start(model, inputs)` gives the state from which `model.step` begins.
    """

    name: str
    build: Callable[..., nn.Module]
    takes: str
    start: Callable | None = None
    compiles: bool = True
    unordered: bool = False  # without positions it doesn't know the order of what it reads
    empty_rows: bool = True  # a row of only padding is read like any other; otherwise a ValueError on the CPU


translator = partial(Case, takes="pair", start=lambda model, x: model.start(x["src"], x["src_mask"]))
rnn = partial(translator, compiles=False, empty_rows=False)
writer = partial(Case, takes="prefix", start=lambda model, x: model.start(x["ids"][:, :0]))
describer = partial(Case, takes="caption", start=lambda model, x: model.start(x["images"]))
MODELS = [
    translator("transformer", transformer_(), unordered=True),
    translator("transformer-modern", transformer_(**MODERN), unordered=True),
    translator("t5", t5_(), unordered=True),
    translator("t5-1.1", t5_(activation="gelu_tanh", gated=True, tied=False), unordered=True),
    rnn("seq2seq-lstm", seq2seq_()),
    rnn("seq2seq-gru", seq2seq_(cell="gru")),
    rnn("seq2seq-attention", seq2seq_(dot_product_attention)),
    writer("gpt1", gpt_(GPTConfig.gpt1)),
    writer("gpt2", gpt_(GPTConfig.gpt2)),
    writer("awd-lstm", awd_lstm_, start=lambda model, x: model.start(len(x["ids"])), compiles=False),
    Case("bert", reader_(BertForMaskedLM, BertConfig), "text", unordered=True),
    Case("roberta", reader_(RobertaForMaskedLM, RobertaConfig, max_len=26), "text", unordered=True),
    Case("albert", reader_(AlbertForMaskedLM, AlbertConfig, d_embedding=24), "text", unordered=True),
    Case("electra-generator", reader_(ElectraForMaskedLM, ElectraConfig, d_embedding=24), "text", unordered=True),
    Case("electra", reader_(ElectraForPreTraining, ElectraConfig, d_embedding=24), "text", unordered=True),
    Case("deberta", reader_(DebertaForMaskedLM, DebertaConfig), "text"),
    Case("deberta-decoder", reader_(DebertaForPreTraining, DebertaConfig), "text"),
    Case("canine", canine_(), "text"),
    Case("xlnet", xlnet_(), "text"),
    Case("vit", vit_(), "images"),
    Case("deit", vit_(BothHeads), "images"),
    describer("captioner", captioner_),
    describer("seq2seq-teller", teller_(), compiles=False),
    describer("seq2seq-teller-attention", teller_(dot_product_attention), compiles=False),
]
FIRST = MODELS[0]._replace(build=transformer_(n_layers=1))  # the one that is broken on purpose below
READER = Case("bert", reader_(BertForMaskedLM, BertConfig), "text")  # and a smaller one, where compiling takes seconds
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])]


def over(condition=lambda case: True):
    "Every model that the condition holds for, on every device."
    models = pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in MODELS if condition(case)])
    return lambda test: pytest.mark.parametrize("device", DEVICES)(models(test))


def causal(case):
    return case.takes in ("pair", "prefix", "caption")


def padded(case):
    return case.takes in ("pair", "text")


@pytest.fixture(autouse=True)
def exact():
    "The same start for every test; no TF32, which cuDNN's recurrent layers would use."
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def unchecked(unchecked, monkeypatch):
    "As a user has the package: jaxtyping's checks are not only off, they are gone, so that torch.compile needn't look through them."
    for name in [name for name in sys.modules if name.startswith("annotated_nlp.")]:
        module = sys.modules[name]
        kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == name]
        for place, key, value in [(owner, *item) for owner in (module, *kinds) for item in vars(owner).items()]:
            if inspect.isfunction(value) and value.__code__.co_filename == jaxtyping._decorator.__file__:
                monkeypatch.setattr(place, key, value.__wrapped__)


def made(case, device, **changes):
    "The model at evaluation, with biases and norms that are not at their starting values."
    model = case.build(**changes)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    return model.to(device).eval()


def inputs(case, device, lengths=LENGTHS, extra=0):
    "A batch as keyword arguments, with `extra` columns that are all padding."
    b, m = len(lengths), max(lengths) + extra
    mask = torch.arange(m) < torch.tensor(lengths)[:, None]
    ids, tgt = torch.randint(4, V, (b, max(lengths))), torch.randint(4, V, (b, TARGET))
    ids = F.pad(ids, (0, extra)).where(mask, 0)
    x = {"pair": dict(src=ids, tgt=tgt, src_mask=mask), "prefix": dict(ids=tgt), "text": dict(ids=ids, mask=mask),
         "images": dict(images=torch.randn(b, 1, SIDE, SIDE)), "caption": dict(images=torch.randn(b, 1, SIDE, SIDE), ids=tgt)}[case.takes]
    return {name: value.to(device) for name, value in x.items()}


def source(x):
    "Names of what is read in any order, and of its mask."
    return ("src", "src_mask") if "src" in x else ("ids", "mask")


def target(x):
    return "tgt" if "tgt" in x else "ids"


def run(model, x, seed=1):
    torch.manual_seed(seed)
    return model(**x)


def real(case, x, output):
    "The outputs that belong to real tokens."
    return output[x["mask"]] if case.takes == "text" else output


def loss(output):
    return -output.float().log_softmax(-1)[..., 0].mean() if output.dtype != torch.float64 else -output.log_softmax(-1)[..., 0].mean()


def near(found, wanted, tolerance=1e-5):
    "Within `tolerance` of the largest entry, or of 1 where all are smaller."
    wanted = wanted.detach()
    scale = max(1.0, wanted.abs().max().item())
    assert_close(found.detach().to(wanted), wanted, atol=tolerance * scale, rtol=0)


# The invariants: functions of a case, so that `BROKEN` can ask them about a broken one


def no_view_of_the_future(case, device, train):
    "What comes later may be anything: earlier outputs stay equal bit for bit, dropout being the same."
    shallow = {} if case.compiles else dict(n_layers=1)  # cuDNN's dropout between layers takes no seed
    model, x = made(case, device, dropout=0.3, **shallow).train(train), inputs(case, device)
    name = target(x)
    before = run(model, x)
    for t in range(1, x[name].shape[1]):
        changed = x[name].clone()
        changed[:, t:] = 4 + (changed[:, t:] - 3) % (V - 4)  # every later token is another
        after = run(model, x | {name: changed})
        assert torch.equal(before[:, :t], after[:, :t]), f"outputs before place {t} know what comes there"
        differ = (before[:, t] != after[:, t]).any(-1)  # in training, dropout may have taken the changed word of some text
        assert differ.any() if train else differ.all(), "the change has no effect at all"
    if train:
        assert not torch.equal(before, run(model, x, seed=2)), "there was no dropout"


def no_trace_of_padding(case, device, train):
    "Junk at padding changes nothing, bit for bit; more padding changes nothing, gradients of all weights included."
    model, x = made(case, device).train(train), inputs(case, device)
    name, mask = source(x)
    before = run(model, x)
    junk = torch.randint(1, V, x[name].shape, device=device)
    after = run(model, x | {name: x[name].where(x[mask], junk)})
    assert not torch.equal(junk.where(~x[mask], 0), torch.zeros_like(junk))
    assert torch.equal(real(case, x, before), real(case, x, after)), "padding's content matters"
    wide = x | {name: F.pad(x[name], (0, 5)), mask: F.pad(x[mask], (0, 5))}
    after = run(model, wide)
    before, after = real(case, x, before), real(case, wide, after)
    near(after, before)
    for one, other in zip(*(torch.autograd.grad(100 * loss(y), list(model.parameters())) for y in (before, after))):
        near(other, one)


def order_is_unknown_without_positions(case, device):
    "A permuted input gives a permuted output (a translator: the same one), and with positions it does not."
    for positions in ("none", "sinusoidal"):
        model, x = made(case, device, positions=positions), inputs(case, device)
        name, mask = source(x)
        order = torch.randperm(x[name].shape[1], device=device)
        before, after = run(model, x), run(model, x | {name: x[name][:, order], mask: x[mask][:, order]})
        wanted = before[:, order] if case.takes == "text" else before
        if positions == "none":
            near(after, wanted)
            if case.takes == "pair":
                first, second = model.encode(x["src"], x["src_mask"])[0], model.encode(x["src"][:, order], x["src_mask"][:, order])[0]
                near(second, first[:, order])
        else:
            assert (after - wanted).abs().max() > 0.01, "positions have no effect"


@torch.no_grad()
def cached_is_uncached(case, device):
    "Token by token, with rows exchanged, repeated and dropped on the way."
    model, x = made(case, device), inputs(case, device)
    name, state = target(x), case.start(model, x)
    for t in range(TARGET):
        logits, state = model.step(x[name][:, t], state)
        near(logits, run(model, x | {name: x[name][:, : t + 1]})[:, -1])
        index = {2: [3, 3, 0, 1, 2], 5: [4, 1, 0]}.get(t)
        if index:
            index = torch.tensor(index, device=device)
            x, state = {key: value[index] for key, value in x.items()}, state.reorder(index)


def batch_is_one_by_one(case, device):
    model, x = made(case, device), inputs(case, device)
    together = run(model, x)
    for row, length in enumerate(LENGTHS):
        alone = {key: value[row : row + 1] for key, value in x.items()}
        if padded(case):
            name, mask = source(x)
            alone |= {name: alone[name][:, :length], mask: alone[mask][:, :length]}
        found = run(model, alone)
        near(found[0], together[row, : len(found[0])])
    if case.takes == "text":  # no mask is the same as a mask that is True everywhere
        near(run(model, {"ids": alone["ids"]}), run(model, alone))


def state_round_trip(case, device, folder):
    "Saved and loaded into a fresh model: the same outputs bit for bit, each weight stored once."
    model, x, file = made(case, device), inputs(case, device), str(folder / "model.safetensors")
    torch.manual_seed(5)
    fresh = made(case, device)
    wanted = run(model, x)
    assert not torch.equal(run(fresh, x), wanted)
    save_model(model.cpu(), file)  # on a GPU, cuDNN keeps an LSTM's matrices in one piece of memory
    assert load_model(fresh, file, device=device) == (set(), [])
    assert torch.equal(run(fresh, x), wanted), "not everything that matters was stored"
    with safe_open(file, "pt") as stored:
        shapes = [tuple(stored.get_slice(name).get_shape()) for name in stored.keys()]  # noqa: SIM118
    assert sorted(shapes) == sorted(tuple(p.shape) for p in model.parameters()), "more than each weight once"
    assert len({p.data_ptr() for p in fresh.parameters()}) == len(shapes)


def compiles_in_one_piece(case, device):
    "Without a graph break; the same output and gradients."
    torch._dynamo.reset()
    model, x = made(case, device, n_layers=1), inputs(case, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    found, wanted = run(compiled, x), run(model, x)
    near(found, wanted)
    for one, other in zip(*(torch.autograd.grad(100 * loss(y), list(model.parameters())) for y in (found, wanted))):
        near(one, other)
    torch._dynamo.reset()


def a_step_compiles_once(case, device):
    "One compiled step serves every place: after the second, at which lengths become variables, nothing is compiled again."
    torch._dynamo.reset()
    model, x, counter = made(case, device, n_layers=1), inputs(case, device), CompileCounter()
    step, wanted, state = torch.compile(model.step, fullgraph=True, backend=counter), run(model, x), case.start(model, x)
    for t in range(TARGET):
        logits, state = step(x[target(x)][:, t], state)
        near(logits, wanted[:, t])
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@torch.no_grad()
def precision_is_rounding(case, device):
    "float32 is float64 to its rounding; bfloat16, of the same weights, to its own of 1 in 256 a few times over."
    model, x = made(case, device), inputs(case, device)
    for p in model.parameters():
        p.copy_(p.bfloat16())
    outputs = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        same = made(case, device).to(dtype)
        same.load_state_dict(model.state_dict())
        here = {key: value.bfloat16().to(dtype) if value.is_floating_point() else value for key, value in x.items()}
        output = real(case, x, run(same, here))
        assert output.dtype == dtype
        outputs[dtype] = output.double()
    scale = outputs[torch.float64].abs().max()
    for dtype, tolerance in ((torch.float32, 64 * 2**-24), (torch.bfloat16, 8 * 2**-8)):
        difference = ((outputs[dtype] - outputs[torch.float64]).abs().max() / scale).item()
        assert 0 < difference < tolerance, f"{dtype} is off by {difference:.1e}"


def gradients_stay_finite(case, device, extreme):
    "With weights a hundred times too large; one token repeated; a row of only padding."
    model, x = made(case, device).train(), inputs(case, device)
    if extreme == "weights":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(100)
    elif extreme == "repeated":
        x = {key: torch.full_like(value, 5) if not value.dtype == torch.bool else value for key, value in x.items()}
    elif padded(case):
        name, mask = source(x)
        x[mask][1] = False
        if not case.empty_rows and device == "cpu":
            with pytest.raises(ValueError, match="row 1"):
                run(model, x)
            return
    output = run(model, x)
    assert output.isfinite().all()
    gradients = torch.autograd.grad(loss(output), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)


# For each kind of input: what is wrong, the argument that is named, and the axis
WRONG = {
    "pair": [(dict(tgt=torch.full((3, 9), 5)), "tgt", "b"), (dict(src_mask=torch.ones(4, 6, dtype=torch.bool)), "src_mask", "m"),
             (dict(tgt=torch.full((9,), 5)), "tgt", "n"), (dict(src=torch.full((4, 7), 5.0)), "src", "m")],
    "prefix": [(dict(ids=torch.full((9,), 5)), "ids", "n"), (dict(ids=torch.full((4, 9), 5.0)), "ids", "b")],
    "text": [(dict(ids=torch.full((9,), 5)), "ids", "n"), (dict(mask=torch.ones(4, 6, dtype=torch.bool)), "mask", "[nm]"),
             (dict(mask=torch.ones(3, 7, dtype=torch.bool)), "mask", "b")],
    "caption": [(dict(ids=torch.full((3, 9), 5)), "ids", "b"), (dict(ids=torch.full((9,), 5)), "ids", "n"), (dict(images=torch.zeros(4, SIDE, SIDE)), "images", "b")],
    "images": [(dict(images=torch.zeros(4, SIDE, SIDE)), "images", "b"), (dict(images=torch.zeros(4, 1, SIDE, SIDE, dtype=torch.long)), "images", "b")],
}


def errors_name_the_axis(case, device):
    model, x = made(case, device), inputs(case, device)
    run(model, x)
    for changes, name, axis in WRONG[case.takes]:
        with pytest.raises(TypeCheckError) as error:
            run(model, x | {key: value.to(device) for key, value in changes.items()})
        text = str(error.value)
        assert f"parameter '{name}'" in text and re.search(rf"Expected type: .*'([^']* )?{axis}( [^']*)?'", text), text


# The suite


@over(causal)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_no_view_of_the_future(case, device, train):
    no_view_of_the_future(case, device, train)


@over(padded)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_no_trace_of_padding(case, device, train):
    no_trace_of_padding(case, device, train)


@over(lambda case: case.unordered)
def test_order_is_unknown_without_positions(case, device):
    order_is_unknown_without_positions(case, device)


@over(lambda case: case.start is not None)
def test_cached_is_uncached(case, device):
    cached_is_uncached(case, device)


@over()
def test_batch_is_one_by_one(case, device):
    batch_is_one_by_one(case, device)


@over()
def test_state_round_trip(case, device, tmp_path):
    state_round_trip(case, device, tmp_path)


@over(lambda case: case.compiles)
def test_compiles_in_one_piece(case, device, unchecked):
    compiles_in_one_piece(case, device)


@over(lambda case: case.compiles and case.start is not None)
def test_a_step_compiles_once(case, device, unchecked):
    a_step_compiles_once(case, device)


@over()
def test_precision_is_rounding(case, device):
    precision_is_rounding(case, device)


@over()
@pytest.mark.parametrize("extreme", ["weights", "repeated", "padding"])
def test_gradients_stay_finite(case, device, extreme):
    gradients_stay_finite(case, device, extreme)


@over()
def test_errors_name_the_axis(case, device):
    errors_name_the_axis(case, device)


def test_canine_reads_what_follows_a_text():
    "Why it is asked only with filled texts: by itself it keeps neither of the two halves of `no_trace_of_padding`."
    bare = Case("canine", canine_(Canine), "text")
    model, x = made(bare, "cpu"), inputs(bare, "cpu")
    before = real(bare, x, run(model, x))
    other = real(bare, x, run(model, x | dict(ids=x["ids"].where(x["mask"], 5))))
    wide = {name: F.pad(value, (0, 5)) for name, value in x.items()}
    more = real(bare, wide, run(model, wide))
    assert (before - other).abs().max() > 1e-3 and (before - more).abs().max() > 1e-3


@torch.no_grad()
def test_canine_may_read_to_the_end_of_the_next_chunk():
    "Where a text ends with a chunk, the convolution up reads the next one: its length counts, and nothing behind it."
    config = CanineConfig(d_model=24, n_heads=4, d_ff=40, n_layers=1, n_buckets=200, max_len=200, window=16)
    model, text = loud(Canine(config)).eval(), torch.randint(1, 150, (1, 16))
    padded = lambda n: model(F.pad(text, (0, n)), mask=torch.arange(16 + n)[None] < 16)[:, :16]
    assert (padded(8) - padded(16)).abs().max() > 1e-3
    assert_close(padded(16), padded(24), atol=1e-4, rtol=1e-4)


# The suite notices: each invariant fails on a model that breaks it


def changed_feed_forward(change):
    "The feed-forward network, its output changed by `change(network, output)`."
    original = FeedForward.forward

    def forward(self, x):
        return change(self, original(self, x))

    return lambda patch: patch.setattr(FeedForward, "forward", forward)


def changed_attention(change):
    "Attention with other arguments, or another function altogether."
    original = kernels.fused_attention
    # what comes after `causal` says whether heads are grouped: here they aren't
    return lambda patch: patch.setattr(attention, "fused_attention", lambda *args: change(original, *args[:8]))


def seen_by_all(original, q, k, v, mask, bias, scale, dropout, causal):
    return original(q, k, v, mask, bias, scale, dropout, False)


def blind_to_masks(original, q, k, v, mask, bias, scale, dropout, causal):
    return original(q, k, v, None, bias, scale, dropout, causal)


def uniform_where_empty(original, q, k, v, mask, bias, scale, dropout, causal):
    "The usual mistake: a softmax over -inf alone."
    return F.scaled_dot_product_attention(q, k, v) if mask is None else ((q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v)


def naive_softmax(original, q, k, v, mask, bias, scale, dropout, causal):
    weights = (q @ k.mT).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def forgetful(patch):
    original = FeedForward.__init__

    def init(self, config):
        original(self, config)
        self.gain = torch.rand(())

    patch.setattr(FeedForward, "__init__", init)
    changed_feed_forward(lambda network, x: x * network.gain)(patch)


def stored_twice(patch):
    original = Block.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.register_buffer("copy", self.feed_forward.layer.up.weight.detach().clone())

    patch.setattr(Block, "__init__", init)


BROKEN = [
    ("attention sees the future", no_view_of_the_future, dict(train=False), changed_attention(seen_by_all)),
    ("a mean over time, in training alone", no_view_of_the_future, dict(train=True), changed_feed_forward(lambda f, x: x + f.training * 1e-3 * x.mean(1, keepdim=True))),
    ("no mask", no_trace_of_padding, dict(train=False), changed_attention(blind_to_masks)),
    ("a mean over the whole row, in training alone", no_trace_of_padding, dict(train=True), changed_feed_forward(lambda f, x: x + f.training * x.mean(1, keepdim=True))),
    ("length matters", no_trace_of_padding, dict(train=False), changed_feed_forward(lambda f, x: x * (1 + 0.01 * x.shape[1]))),
    ("places leak in", order_is_unknown_without_positions, {}, changed_feed_forward(lambda f, x: x * (1 + 0.1 * torch.arange(x.shape[1])[:, None]))),
    ("positions are never added", order_is_unknown_without_positions, {}, lambda patch: patch.setattr(Positions, "forward", lambda self, x, start=0: x)),
    ("every step is the first", cached_is_uncached, {}, lambda patch: patch.setattr(Positions, "forward", lambda self, x, start=0: x + self.table[: x.shape[1]])),
    ("rows are not exchanged", cached_is_uncached, {}, lambda patch: patch.setattr(KVCache, "reorder", lambda self, index, filled=None: KVCache(self.k[: len(index)].repeat(2, 1, 1, 1)[: len(index)], self.v[: len(index)].repeat(2, 1, 1, 1)[: len(index)]))),
    ("the last place isn't copied", cached_is_uncached, {}, lambda patch: patch.setattr(KVCache, "reorder", lambda self, index, filled=None: KVCache(*(F.pad(x[index][:, :, : filled - 1], (0, 0, 0, x.shape[2] - filled + 1)) for x in (self.k, self.v))) if filled else KVCache(self.k[index], self.v[index]))),
    ("a mean over the batch", batch_is_one_by_one, {}, changed_feed_forward(lambda f, x: x + 0.01 * x.mean(0, keepdim=True))),
    ("a number outside the state", state_round_trip, "folder", forgetful),
    ("a copy of a weight", state_round_trip, "folder", stored_twice),
    ("a choice by value", compiles_in_one_piece, {}, changed_feed_forward(lambda f, x: x if x.sum() > 0 else 2 * x)),
    ("another function when compiled", compiles_in_one_piece, {}, changed_feed_forward(lambda f, x: x * (1.01 if torch.compiler.is_compiling() else 1.0))),
    ("a step for each place", a_step_compiles_once, {}, lambda patch: patch.setattr(Positions, "forward", lambda self, x, start=0: x + self.table[torch.arange(x.shape[1]) + int(str(start))])),
    ("float32 in half precision", precision_is_rounding, {}, changed_feed_forward(lambda f, x: x.half().to(x.dtype) if x.dtype == torch.float32 else x)),
    ("bfloat16 off by a tenth", precision_is_rounding, {}, changed_feed_forward(lambda f, x: 1.1 * x if x.dtype == torch.bfloat16 else x)),
    ("a softmax that overflows", gradients_stay_finite, dict(extreme="weights"), changed_attention(naive_softmax)),
    ("a spread without epsilon", gradients_stay_finite, dict(extreme="repeated"), changed_feed_forward(lambda f, x: x + (x - x[:, :1]).square().sum(-1, keepdim=True).sqrt())),
    ("a softmax of nothing", gradients_stay_finite, dict(extreme="padding"), changed_attention(uniform_where_empty)),
]


@pytest.mark.parametrize("invariant,arguments,breaks", [pytest.param(*rest, id=name) for name, *rest in BROKEN])
def test_the_suite_notices(invariant, arguments, breaks, monkeypatch, tmp_path, unchecked):
    case = READER if invariant is compiles_in_one_piece else FIRST
    arguments = dict(folder=tmp_path) if arguments == "folder" else arguments
    invariant(case, "cpu", **arguments)
    breaks(monkeypatch)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, torch._dynamo.exc.TorchDynamoException)):
        invariant(case, "cpu", **arguments)


def test_the_suite_notices_shapes_that_nobody_checks(unchecked):
    with pytest.raises(ValueError):  # the module's own error, which is no TypeCheckError
        errors_name_the_axis(FIRST, "cpu")
