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
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from parity import GPU
from second_device import waiting
from test_invariants import LENGTHS, MODELS, TARGET, V, inputs, made
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

from annotated_nlp import decoding, seq2seq, training
from annotated_nlp.attention import CrossAttention, SelfAttention, attention_maps
from annotated_nlp.attention import causal_mask, scaled_dot_product
from annotated_nlp.bert import Bert, BertConfig, BertForMaskedLM, BertForPreTraining
from annotated_nlp.bert import BertForQuestionAnswering, BertForSequenceClassification
from annotated_nlp.bert import BertForTokenClassification
from annotated_nlp.data import Batch
from annotated_nlp.denoising import mask_pieces
from annotated_nlp.electra import Electra, ElectraConfig, ElectraForMaskedLM
from annotated_nlp.electra import ElectraForPreTraining
from annotated_nlp.electra import ElectraForSequenceClassification
from annotated_nlp.electra import ElectraForTokenClassification, ElectraPair
from annotated_nlp.electra import electra_loss
from annotated_nlp.gpt import GPT, GPTConfig, GPTForSequenceClassification
from annotated_nlp.lab import difference
from annotated_nlp.parts import recurrent
from annotated_nlp.parts.embedding import Positions
from annotated_nlp.parts.kernels import local_attention
from annotated_nlp.parts.pictures import ConvNet, mixup, random_affine
from annotated_nlp.parts.recording import record
from annotated_nlp.t5 import T5, T5Config, relative_buckets
from annotated_nlp.tasks.tuning import larger_steps
from annotated_nlp.transformer import Transformer, TransformerConfig
from annotated_nlp.vit import DeiT, ViT, ViTConfig, attention_rollout, hard_distillation
from annotated_nlp.vit import soft_distillation

SIZES = dict(d_model=16, n_heads=2, n_layers=2, dropout=0.1)
WORDS = dict(vocab_size=V, d_ff=24, max_len=24, n_classes=3) | SIZES
PICTURES = dict(image_size=8, patch_size=4, n_channels=1, n_classes=3, d_ff=24) | SIZES
SPREAD = dict(d_embedding=8) | WORDS
B, N = len(LENGTHS), max(LENGTHS)


# The device itself: its rules are held against CUDA's where there is one.

REFUSED = {
    "sum with the CPU's": lambda x, ids: x + x.cpu(),
    "in place": lambda x, ids: x.add_(x.cpu()),
    "into the CPU's": lambda x, ids: x.cpu().add_(x),
    "number of the card, tensor of the CPU": lambda x, ids: x.sum() + x.cpu(),
    "matrices": lambda x, ids: x @ x.cpu().T,
    "a bias": lambda x, ids: F.linear(x, x, x[:, 0].cpu()),
    "joined": lambda x, ids: torch.cat([x, x.cpu()]),
    "mask": lambda x, ids: x.masked_fill((x > 0).cpu(), 0.0),
    "choice": lambda x, ids: torch.where((x > 0).cpu(), x, 0.0),
    "embedding": lambda x, ids: F.embedding(ids.cpu(), x),
    "gathered": lambda x, ids: x.gather(1, ids[:, None].cpu()),
    "one scalar as index": lambda x, ids: x.index_select(0, torch.tensor(0)),
    "index of the card": lambda x, ids: x.cpu()[ids],
    "labels": lambda x, ids: F.cross_entropy(x, ids.cpu()),
    "generator": lambda x, ids: torch.rand(3, device=x.device, generator=torch.Generator()),
    "NumPy": lambda x, ids: x.numpy(),
}
WAITS = {
    "value": lambda x, ids: x.sum().item(),
    "condition": lambda x, ids: bool(x.any()),
    "slice": lambda x, ids: x[: ids.max()],
    "equal": lambda x, ids: torch.equal(x, x),
    "non-zero": lambda x, ids: x.nonzero(),
    "under a mask": lambda x, ids: x[x > 0],
    "assigned under a mask": lambda x, ids: x.clone().__setitem__(x > 0, x[0, 0]),
    "selected": lambda x, ids: x.masked_select(x > 0),
    "different ones": lambda x, ids: ids.unique(),
    "repeated": lambda x, ids: x.repeat_interleave(ids, 0),
    "drawn": lambda x, ids: torch.multinomial(x.exp(), 1),
    "to the CPU": lambda x, ids: x.cpu(),
    "from the CPU": lambda x, ids: HERE.to(x.device),
    "made of a list": lambda x, ids: torch.tensor([1.0], device=x.device),
    "index of the CPU": lambda x, ids: x[torch.tensor([0, 1])],
}
FREE = {
    "scalar of the CPU": lambda x, ids: torch.tensor(2.0) * x + torch.tensor(1.0),
    "made there": lambda x, ids: (torch.arange(3, device=x.device), torch.zeros_like(x), x.new_ones(2), torch.eye(3, device=x.device)),
    "drawn there": lambda x, ids: (torch.rand(3, device=x.device), torch.randperm(3, device=x.device), F.dropout(x)),
    "indices": lambda x, ids: (x[ids], x.gather(1, ids[:, None]), F.embedding(ids, x)),
    "scattered": lambda x, ids: (x.masked_scatter(x > 0, x), x.scatter(1, ids[:, None], 0.0), F.one_hot(ids, 3)),
    "ordered": lambda x, ids: (x.sort(), x.topk(2), x.argmax(), x.cumsum(0), x.unfold(1, 2, 1)),
    "repeated, the sum being known": lambda x, ids: x.repeat_interleave(ids, 0, output_size=1),
    "copied without waiting": lambda x, ids: HERE.to(x.device, non_blocking=True),
}
HERE = torch.ones(2)


def sync_errors(on):
    "Let CUDA itself refuse to wait."
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def attempt(rule, device):
    "How often the host waits; -1 where CUDA, which doesn't count, waits."
    x, ids = torch.randn(2, 3).to(device), torch.tensor([0, 1]).to(device)
    with waiting() as waits:
        sync_errors(True)
        try:
            rule(x, ids)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return -1
        finally:
            sync_errors(False)
    return waits.total()


CARDS = pytest.mark.parametrize("device", ["card", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])])


@CARDS
@pytest.mark.parametrize("rule", REFUSED.values(), ids=REFUSED)
def test_what_a_card_refuses(rule, device):
    with pytest.raises((RuntimeError, TypeError), match="device"):
        x, ids = torch.randn(2, 3).to(device), torch.tensor([0, 1]).to(device)
        rule(x, ids)


@CARDS
@pytest.mark.parametrize("rule", WAITS)
def test_what_a_card_makes_wait(rule, device):
    if device == "cuda" and rule in ("equal", "drawn"):
        pytest.skip("CUDA's debug mode says nothing of it (seen with PyTorch 2.11)")
    assert attempt(WAITS[rule], device)


@CARDS
@pytest.mark.parametrize("rule", FREE.values(), ids=FREE)
def test_what_costs_no_wait(rule, device):
    assert not attempt(rule, device)


def test_a_card_on_its_own():
    "Views share memory, changes in place have their gradients, random numbers and dropout are the CPU's."

    def played(device):
        torch.manual_seed(0)
        x = torch.randn(3, 4).to(device).requires_grad_()
        y = x * 2
        y[1:, 2:] = x[:2, :2].exp()
        y[:, 1].mul_(F.dropout(x)[:, 0])
        y.unfold(1, 2, 1).select(0, 1).add_(torch.rand(3, 2, device=device))
        (y**2).sum().backward()
        return [y.detach().cpu(), x.grad.cpu()]

    assert all(torch.equal(*pair) for pair in zip(played("card"), played("cpu")))
    assert not torch.accelerator.is_available(), "and nobody gets it without asking"


def test_the_line_that_waits():
    "Where the package asks for it, wherever PyTorch does it."
    model, ids = GPT(gpt).to("card"), torch.ones(2, 3, dtype=torch.long, device="card")
    with waiting() as waits:
        model.generate(ids, 2)
        ids.sum().item()
    assert waits.pop(("aten::_local_scalar_dense", "elsewhere")) == 1
    assert waits and {line.partition(":")[0] for _, line in waits} <= {"decoding.py", "checks.py"}


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
    return [seq2seq.cross_entropy(output, right, right > 4, smoothing) for smoothing in (0.0, 0.1)]


def electra(pair, ids, segments, mask):
    masked = mask_pieces(ids, mask, mask_id=1, vocab_size=V, rate=0.5)
    return electra_loss(ids, masked.chosen, pair(ids, masked, segments, mask), mask)


def some_pieces(model, ids, segments, mask):
    "As BERT is pretrained: logits of the chosen pieces alone, whose number decides a shape."
    masked = mask_pieces(ids, mask, mask_id=1, vocab_size=V, rate=0.5)
    chosen = masked.chosen
    return F.cross_entropy(model.pieces(model.trunk(masked.ids, segments, mask)[chosen]), ids[chosen])


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


def recorded(model, pictures):
    with record(model, SelfAttention) as calls:
        model(pictures)
    return [*calls.values()]


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
    Scene("gpt, prefix", lambda: (GPT(prefix), text()[0], torch.tensor(LENGTHS)), lambda model, ids, prefix: model(ids, prefix=prefix)),
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
    *(
        Scene(f"{name}, all layers", lambda kind=kind, config=config: (kind(config), text()[0]), lambda model, ids: model.states(ids, all_layers=True))
        for name, kind, config in (("bert", Bert, bert), ("gpt", GPT, gpt), ("electra", Electra, spread))
    ),
    Scene("recorded", lambda: (ViT(vit), images()), recorded),
    Scene("rollout", lambda: (ViT(vit), images()), maps),
    Scene("t5, larger steps", lambda: (T5(t5), text()[0], text()[0]), lambda model, *x: larger(model, *x)),
    Scene("attention, cached", lambda: (SelfAttention(16, 2, causal=True), states(), text()[2]), cached),
    Scene("attention, of a memory", lambda: (CrossAttention(16, 2, 16), states(3), states(), text()[2]), lambda attend, *x: attend(*x)),
    Scene("attention, by hand", lambda: (*heads_(N), text()[2][:, None, None]), lambda *x: scaled_dot_product(*x, dropout=0.2)),
    Scene("local attention", lambda: heads_(), lambda *x: local_attention(*x, window=4)),
    Scene("local attention, masked", lambda: (*heads_(N), text()[2]), lambda q, k, v, mask: local_attention(q, k, v, 4, mask)),
    Scene("causal mask", lambda: (states(),), lambda x: causal_mask(3, 5, x.device)),
    Scene("buckets", lambda: (torch.arange(-40, 40),), lambda x: (relative_buckets(x), relative_buckets(x, causal=True))),
    Scene("positions of each row", lambda: (Positions("learned", 24, 16), states(), torch.tensor(LENGTHS)), lambda add, *x: add(*x)),
    Scene("recurrent, by hand", lambda: (recurrent.RNN(16, 8, 2, bidirectional=True), states(), text()[2]), lambda rnn, *x: rnn(*x)),
    Scene("recurrent, no mask", lambda: (recurrent.RNN(16, 8, cell="gru"), states()), lambda rnn, *x: rnn(*x)),
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
def as_on_cuda(request):
    "Parameters keep their identity when a module moves, and both devices attend by the same operations."
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        pytest.skip("the card stands in for CUDA, which is here")
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


def test_difference_of_scores():
    "What was measured on a card is drawn from on the CPU: the same interval."
    arms, options = torch.rand(2, 3, 20, dtype=torch.float64), dict(paired=True, resamples=50)
    assert difference(*arms.to("card"), **options) == difference(*arms, **options)


# Writing text


class Writing(NamedTuple):
    "A way to write `n` tokens. `every`: after how many of them the host looks whether all rows have ended; None: never."

    name: str
    make: Callable[[], tuple]
    write: Callable  # of what was made, and n
    every: int | None = 16


def from_start(search, **options):
    "What `decoding` does with any model that can step."

    def write(model, x, n):
        with torch.no_grad():
            source = [x[name] for name in ("src", "src_mask", "images") if name in x]
            state = model.eval().start(*source) if source else model.eval().start(x["ids"][:, :-1])
            first = x["tgt"][:, 0] if "tgt" in x else x["ids"][:, -1]
            return search(model.step, state, first, max_new_tokens=n, stop_id=RARE, **options)

    return write


def generate(lengths=False, **options):
    "All positions count, or those under the mask."
    return lambda model, ids, mask, n: model.generate(ids, n, **options | (dict(mask=mask) if lengths else {}))


def stepper(case):
    room = dict(max_len=TARGET + MOST) if case.name.startswith(("transformer", "gpt", "captioner")) else {}
    return lambda: (made(case, "cpu", **room), inputs(case, "cpu"))


def prompts(model):
    return lambda: (model(), text()[0].flip(1), text()[2].flip(1))


RARE, MOST = 3, 18  # a token that would end a row; how many tokens are written
FILTERS = dict(temperature=0.8, top_k=7, top_p=0.9)
LONG = dict(max_len=TARGET + MOST)
gpt_ = prompts(lambda: GPT(GPTConfig(**WORDS | LONG)))
prefix_ = prompts(lambda: GPT(GPTConfig(**WORDS | LONG, prefix_lm=True)))
t5_ = prompts(lambda: T5(t5))
transformer_ = prompts(lambda: Transformer(TransformerConfig(src_vocab_size=V, tgt_vocab_size=V, d_ff=24, **SIZES | LONG)))
# the LSTM begins with a number of rows, and generates below
stepping_ = [case for case in MODELS if case.start and case.name != "awd-lstm"]
BY_NAME = {case.name: case for case in MODELS}
WRITING = [
    *(Writing(f"{case.name}, greedy", stepper(case), from_start(decoding.greedy)) for case in stepping_),
    *(Writing(f"{case.name}, beam", stepper(case), from_start(decoding.beam_search, beam=3), 1) for case in stepping_),
    Writing("recurrent, sample", stepper(BY_NAME["seq2seq-gru"]), from_start(decoding.sample, **FILTERS)),
    Writing("gpt", gpt_, generate(), None),
    Writing("awd-lstm", prompts(lambda: made(BY_NAME["awd-lstm"], "cpu")), generate(lengths=True, stop_id=RARE)),
    Writing("gpt, stop", gpt_, generate(stop_id=RARE)),
    Writing("gpt, sample", gpt_, generate(**FILTERS), None),
    Writing("gpt, lengths", gpt_, generate(lengths=True, stop_id=RARE)),
    Writing("gpt, beam", gpt_, generate(lengths=True, beam=2, stop_id=RARE), 1),
    Writing("gpt, prefix", prefix_, generate(lengths=True), None),
    *(
        Writing(f"{name}, {rule}", make, generate(lengths, stop_id=RARE, **options), every)
        for name, make in (("t5", t5_), ("transformer", transformer_))
        for rule, lengths, every, options in (("generate", False, 16, {}), ("filters", True, 16, FILTERS), ("hypotheses", True, 1, dict(beam=2)))
    ),
]


def written(way, device, n):
    torch.manual_seed(0)
    things = [moved(x, device) for x in way.make()]
    torch.manual_seed(1)
    with waiting() as waits:
        found = way.write(*things, n)
    found = [found] if isinstance(found, Tensor) else [*found]
    assert {x.device.type for x in found} == {device}
    return [x.cpu() for x in found], waits


@pytest.mark.parametrize("way", WRITING, ids=lambda way: way.name)
def test_writing(way):
    "The same text. At its begin and end the host waits a few times, between them once in `every` tokens."
    ends = written(way, "card", 1)[1].total()
    assert ends <= 4
    (found, waits), (wanted, _) = written(way, "card", MOST), written(way, "cpu", MOST)
    same(found, wanted)
    assert found[0].shape[-1] >= MOST, "all rows ended early, so nothing is counted: choose another RARE"
    assert waits.total() - ends <= (MOST // way.every if way.every else 0), waits


# Training, saving


@pytest.fixture
def accelerate_on(monkeypatch):
    "Accelerate takes a device by name from the environment; then it must forget the one that it knows."
    gather = Accelerator.gather

    def as_nccl(self, tensor):
        assert tensor.device.type == self.device.type, "NCCL sends nothing from another device"
        return gather(self, tensor)

    def on(device):
        monkeypatch.setattr(Accelerator, "gather", as_nccl)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        AcceleratorState._reset_state(True)

    yield on
    AcceleratorState._reset_state(True)


def loss_of(model, batch):
    output, right, mask = model(batch.src, batch.tgt[:, :-1], batch.src_mask), batch.tgt[:, 1:], batch.tgt_mask[:, 1:]
    return seq2seq.cross_entropy(output, right, mask), mask.sum()


UPDATES = dict(loss=loss_of, steps=3, accumulate=2, clip=0.5)


def in_one_run(model, batches, folder):
    return training.fit(model, batches, **UPDATES).loss


def without_counts(model, batches, folder):
    "All batches weigh the same."
    return training.fit(model, batches, **UPDATES | dict(loss=lambda *x: loss_of(*x)[0])).loss


def in_two_runs(model, batches, folder):
    "The second goes on from the first one's checkpoint: weights and moments return to the device."

    def interrupt(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.fit(model, batches, **UPDATES, folder=folder, save_every=1, evaluate=interrupt, evaluate_every=2)
    assert any(folder.iterdir())
    return training.fit(model, batches, **UPDATES, folder=folder).loss


def recomputed(model, batches, folder):
    "Activations are computed again in the backward pass, with the same random numbers."
    return training.fit(model, batches, **UPDATES, checkpoint=True).loss


def by_hand(model, batches, folder):
    return seq2seq.teacher_forcing(model, batches, steps=3)


def trained(fit, device, folder):
    "Losses and weights after three updates, and what the host waited for."
    torch.manual_seed(0)
    model = made(MODELS[0], "cpu", dropout=0.1).to(device, torch.float64)
    batches = [Batch(**x, tgt_mask=x["tgt"] > 5) for x in (inputs(MODELS[0], "cpu") for _ in range(6))]
    with waiting() as waits:
        losses = fit(model, batches, folder)
    assert {p.device.type for p in model.parameters()} == {device}
    return [torch.tensor(losses), *(p.detach().cpu() for p in model.parameters())], waits


@pytest.mark.parametrize("fit", [in_one_run, without_counts, in_two_runs, recomputed, by_hand])
def test_fit(fit, accelerate_on, tmp_path):
    "The same weights. What the host waits for stands in the loop (batches, loss, norm, checkpoints), not in model or loss."
    accelerate_on("card:0")
    found, waits = trained(fit, "card", tmp_path / "card")
    accelerate_on("cpu")
    same(found, trained(fit, "cpu", tmp_path / "cpu")[0])
    modules = {line.partition(":")[0] for _, line in waits}
    assert modules <= {"training.py", "resuming.py", "data.py", "elsewhere"} | ({"seq2seq.py"} if fit is by_hand else set()), waits


@pytest.mark.parametrize("case", [case for case in MODELS if hasattr(case.build(), "save_pretrained")], ids=lambda case: case.name)
def test_saved_on_one_device_and_loaded_on_the_other(case, tmp_path):
    model = made(case, "cpu")
    wanted = [p.detach().clone() for p in model.parameters()]
    model.to("card").save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    same([*loaded.parameters()], wanted)
    straight = type(model).from_pretrained(tmp_path, device="card", dtype="float64")
    assert {p.device.type for p in straight.parameters()} == {"card"}
    same([p.cpu() for p in straight.parameters()], [p.double() for p in wanted])
    there = type(model).from_pretrained(tmp_path, device="card")
    assert {tensor.device.type for tensor in [*there.parameters(), *there.buffers()]} == {"card"}
    same([p.cpu() for p in there.parameters()], wanted)
