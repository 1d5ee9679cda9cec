"""All that a model does, on a second device: as on the CPU, nothing mixed, and no wait that isn't named here.

A scene joins by one line in SCENES, a way to write text by one in WRITING. That they notice a lost `device=` is proved
by `prove_second_device.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import second_device  # noqa: F401 (makes the device)
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from second_device import waiting
from test_invariants import LENGTHS, MODELS, TARGET, Case, V, inputs, made
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

from annotated_nlp import decoding, seq2seq, training
from annotated_nlp.attention import Attention, attention_maps, causal_mask, local_attention, scaled_dot_product
from annotated_nlp.bert import (
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Masked,
    mask_pieces,
)
from annotated_nlp.data import Batch
from annotated_nlp.electra import (
    Electra,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraPair,
    electra_loss,
)
from annotated_nlp.gpt import GPT, GPTConfig, GPTForSequenceClassification
from annotated_nlp.t5 import T5, T5Config, larger_steps, relative_buckets
from annotated_nlp.transformer import Positions, smoothed_cross_entropy
from annotated_nlp.vit import (
    ConvNet,
    DeiT,
    ViT,
    ViTConfig,
    attention_rollout,
    hard_distillation,
    mixup,
    random_affine,
    soft_distillation,
)

SIZES = dict(d_model=16, n_heads=2, n_layers=2, dropout=0.1)
WORDS = dict(vocab_size=V, d_ff=24, max_len=24, n_classes=3) | SIZES
PICTURES = dict(image_size=8, patch_size=4, n_channels=1, n_classes=3, d_ff=24) | SIZES
SPREAD = dict(d_embedding=8) | WORDS
B, N = len(LENGTHS), max(LENGTHS)


class Scene(NamedTuple):
    """Something to do on a device. `make()` gives modules and tensors on the CPU, `act` does it with them elsewhere.

    `act` gives a tree of tensors; those that have a gradient are squared, summed and sent back. `waits` counts what the
    host must wait for, backward included.
    """

    name: str
    make: Callable[[], tuple]
    act: Callable
    waits: int = 0


# What scenes are made of


def text():
    "Token ids, segments, and where they are real."
    mask = torch.arange(N) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(4, V, (B, N)) * mask, (torch.arange(N) > 2).long().expand(B, N).clone(), mask


def images(side=8):
    return torch.randn(B, 1, side, side, dtype=torch.float64, requires_grad=True)


def heads_(n=6):
    "Queries, keys and values of two heads."
    return tuple(torch.randn(B, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))


def states(n=N):
    return torch.randn(B, n, 16, dtype=torch.float64, requires_grad=True)


def logits(c=3):
    return torch.randn(B, c, dtype=torch.float64, requires_grad=True)


def labels(c=3):
    return torch.randint(c, (B,))


def pair():
    return ElectraPair(ElectraForMaskedLM(ElectraConfig(**SPREAD)), ElectraForPreTraining(ElectraConfig(**SPREAD)))


# What is done in them


def sequence(model, src, tgt, mask):
    "Teacher forcing, as both translators are trained."
    output, right = model(src, tgt[:, :-1], mask), tgt[:, 1:]
    return seq2seq.sequence_loss(output, right, right > 4), smoothed_cross_entropy(output, right, right > 4)


def electra(pair, ids, segments, mask):
    masked = mask_pieces(ids, mask, mask_id=1, vocab_size=V, rate=0.5)
    return electra_loss(ids, masked.chosen, pair(ids, masked, segments, mask), mask)


def some_pieces(model, ids, segments, mask):
    "As BERT is pretrained: logits of the chosen pieces alone, whose number decides a shape."
    masked = mask_pieces(ids, mask, mask_id=1, vocab_size=V, rate=0.5)
    chosen = masked.chosen
    return F.cross_entropy(model.pieces(model.bert(masked.ids, segments, mask)[chosen]), ids[chosen])


def cached(attend, x, mask):
    "Two positions, then one at a time, and the whole at once."
    cache, parts = attend.new_cache(B, N), []
    with torch.no_grad():
        for start, stop in [(0, 2), *((t, t + 1) for t in range(2, N))]:
            parts.append(attend(x[:, start:stop], mask=mask[:, :stop], cache=cache, start=start))
    return parts, attend(x, mask=mask), attend(x, mask=mask, need_weights=True)


def maps(model, pictures):
    with attention_maps(model) as found:
        model(pictures)
    return attention_rollout([*found.values()])


def larger(model, *x):
    with larger_steps(model):
        model(*x).square().sum().backward()
        return [p.grad for p in model.parameters()]


def stepping(case):
    def act(model, x):
        with torch.no_grad():
            state = case.start(model.eval(), x)
            state = state.reorder(torch.arange(B, device=state_device(x)).flip(0))
            steps = []
            for t in range(3):
                ids, state = x["tgt" if "tgt" in x else "ids"][:, t], state
                output, state = model.step(ids, state)
                steps.append(output)
        return steps

    return act


def state_device(x):
    return next(iter(x.values())).device


def whole(case, **changes):
    return lambda: (made(case, "cpu", **changes).train(), inputs(case, "cpu"))


def shallow(case):
    "Dropout between the layers of a fused recurrent network follows the order of its memory."
    return dict(n_layers=1) if case.name.startswith("seq2seq") else {}


def forward(model, x):
    return model(**x)


bert = BertConfig(**WORDS)
spread = ElectraConfig(**SPREAD)
gpt = GPTConfig(**WORDS)
prefix = GPTConfig(**WORDS, prefix_lm=True)
vit = ViTConfig(**PICTURES)
t5 = T5Config(vocab_size=V, d_ff=24, d_head=8, **SIZES)
SCENES = [
    *(Scene(case.name, whole(case), forward) for case in MODELS),
    *(Scene(f"{case.name}, dropout", whole(case, dropout=0.3, **shallow(case)), forward) for case in MODELS),
    *(Scene(f"{case.name}, step", whole(case), stepping(case)) for case in MODELS if case.start),
    *(
        Scene(f"{case.name}, loss", lambda case=case: (made(case, "cpu").train(), *inputs(case, "cpu").values()), sequence)
        for case in MODELS
        if case.takes == "pair"
    ),
    Scene("gpt, prefix", lambda: (GPT(prefix), text()[0], torch.tensor(LENGTHS)), lambda model, *x: model(*x)),
    Scene("gpt, no prefix", lambda: (GPT(prefix), text()[0]), lambda model, *x: model(*x)),
    Scene("gpt classifier", lambda: (GPTForSequenceClassification(gpt), text()[0], text()[2]), lambda model, *x: model(*x)),
    Scene("gpt classifier, no mask", lambda: (GPTForSequenceClassification(gpt), text()[0]), lambda model, *x: model(*x)),
    Scene("bert, pieces alone", lambda: (Bert(bert), text()[0]), lambda model, ids: model.pooler(model(ids))),
    *(
        Scene(kind.__name__, lambda kind=kind: (kind(bert), *text()), lambda model, *x: model(*x))
        for kind in (Bert, BertForPreTraining, BertForMaskedLM, BertForSequenceClassification, BertForTokenClassification, BertForQuestionAnswering)
    ),
    *(
        Scene(kind.__name__, lambda kind=kind: (kind(spread), *text()), lambda model, *x: model(*x))
        for kind in (Electra, ElectraForMaskedLM, ElectraForPreTraining, ElectraForSequenceClassification, ElectraForTokenClassification)
    ),
    # What is chosen decides a shape, three times: the states there, their way back, and the pieces there.
    Scene("bert, chosen pieces", lambda: (BertForMaskedLM(bert), *text()), some_pieces, waits=3),
    # And `multinomial` looks whether the rows are distributions.
    Scene("electra pair", lambda: (pair(), *text()), electra, waits=4),
    Scene("mask pieces", lambda: (text()[0], text()[2]), lambda ids, mask: mask_pieces(ids, mask, mask_id=1, vocab_size=V)),
    Scene("vit, larger images", lambda: (ViT(vit), images(12)), lambda model, x: model(x)),
    Scene("convolutions", lambda: (ConvNet(1, 3, 4), images()), lambda model, x: model(x)),
    Scene("deit, soft", lambda: (DeiT(vit), images(), labels(), logits()), lambda model, x, *right: soft_distillation(model(x), *right)),
    Scene("deit, hard", lambda: (DeiT(vit), images(), labels(), logits()), lambda model, x, *right: hard_distillation(model(x), *right)),
    Scene("mixup", lambda: (images(), labels()), lambda x, right: mixup(x, right, 3)),
    Scene("cutmix", lambda: (images(), labels()), lambda x, right: mixup(x, right, 3, cut=True)),
    Scene("affine", lambda: (images(),), lambda x: random_affine(x, degrees=20, shift=0.1, scale=0.1)),
    Scene("rollout", lambda: (ViT(vit), images()), maps),
    Scene("t5, larger steps", lambda: (T5(t5), text()[0], text()[0]), lambda model, *x: larger(model, *x)),
    Scene("attention, cached", lambda: (Attention(16, 2, causal=True), states(), text()[2]), cached),
    Scene("attention, of a memory", lambda: (Attention(16, 2, d_memory=16), states(3), states(), text()[2]), lambda attend, *x: attend(*x)),
    Scene("attention, by hand", lambda: (*heads_(N), text()[2][:, None, None]), lambda *x: scaled_dot_product(*x, dropout=0.2)),
    Scene("local attention", lambda: heads_(), lambda *x: local_attention(*x, window=4)),
    Scene("local attention, masked", lambda: (*heads_(N), text()[2]), lambda q, k, v, mask: local_attention(q, k, v, 4, mask)),
    Scene("causal mask", lambda: (states(),), lambda x: causal_mask(3, 5, x.device)),
    Scene("buckets", lambda: (torch.arange(-40, 40),), lambda x: (relative_buckets(x), relative_buckets(x, causal=True))),
    Scene("positions of each row", lambda: (Positions("learned", 24, 16), states(), torch.tensor(LENGTHS)), lambda add, *x: add(*x)),
    Scene("recurrent, by hand", lambda: (seq2seq.RNN(16, 8, 2, bidirectional=True), states(), text()[2]), lambda rnn, *x: rnn(*x)),
    Scene("recurrent, no mask", lambda: (seq2seq.RNN(16, 8, cell="gru"), states()), lambda rnn, *x: rnn(*x)),
]


def moved(x, device):
    "A module, a tensor, or a tree of tensors on the device; floats are float64, in which rounding can't hide anything."
    if isinstance(x, nn.Module):
        return x.to(device, torch.float64)

    def move(x):
        x_ = x.detach().to(device, torch.float64 if x.is_floating_point() else None)
        return x_.requires_grad_(x.requires_grad)

    return tree_map(move, x)


@pytest.fixture(autouse=True)
def as_on_cuda():
    "Parameters keep their identity when a module moves, and both devices attend by the same operations."
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def played(scene, device):
    "Outputs and gradients, and what the host waited for."
    torch.manual_seed(0)
    things = [moved(x, device) for x in scene.make()]
    torch.manual_seed(1)
    with waiting() as waits:
        outputs = [y for y in tree_leaves(scene.act(*things)) if isinstance(y, Tensor)]
        total = sum(y.square().sum() for y in outputs if y.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    assert outputs and {y.device.type for y in outputs} == {device}
    leaves = [p for x in things for p in (x.parameters() if isinstance(x, nn.Module) else tree_leaves(x))]
    gradients = [p.grad for p in leaves if p.grad is not None]
    assert {y.device.type for y in gradients} <= {device}
    return [y.detach().cpu() for y in outputs + gradients], waits


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert_close(one, other, atol=1e-11, rtol=1e-11, equal_nan=True)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_scene(scene):
    (found, waits), (wanted, none) = played(scene, "card"), played(scene, "cpu")
    same(found, wanted)
    assert waits.total() == scene.waits, waits
    assert not none


# Writing text


class Writing(NamedTuple):
    "A way to write `n` tokens. `every`: after how many of them the host looks whether all rows have ended; 0 never."

    name: str
    make: Callable[[], tuple]
    write: Callable  # of what was made, and n
    every: int = 16


def from_start(search, **options):
    "What `decoding` does with any model that can step."

    def write(model, x, n):
        model.eval()
        with torch.no_grad():
            source = [x[name] for name in ("src", "src_mask") if name in x]
            state = model.start(*source) if source else model.start(x["ids"][:, :-1])
            start = torch.full_like(x["tgt"][:, 0], 2) if source else x["ids"][:, -1]
            return tuple(search(model.step, state, start, max_new_tokens=n, stop_id=UNUSED, **options))

    return write


def generate(**options):
    return lambda model, *x: model.generate(*x[:-1], x[-1], **options)


UNUSED, MOST = 3, 33  # a token that ends a row, never written; the most tokens that are written
ROOM = dict(max_len=N + MOST)
BY_NAME = {case.name: case for case in MODELS}
FILTERS = dict(temperature=0.8, top_k=7, top_p=0.9)
